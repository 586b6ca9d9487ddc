import pytest

from lightrl.imports import load_object

BUILTIN = {"sampler": "lightrl.data.sampler:PromptSampler"}


def load(name: str) -> object:
    return load_object(name, builtin=BUILTIN, what="thing", example="MyThing")


def test_built_in_names_and_import_paths_load_alike() -> None:
    assert load("sampler") is load("lightrl.data.sampler:PromptSampler")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sampler2", "Unknown thing 'sampler2'. Did you mean sampler\\?.*package.module:MyThing"),
        ("lightrl.nowhere:X", "there is no module 'lightrl.nowhere'"),
        ("lightrl.data.sampler:X", "module 'lightrl.data.sampler' has no 'X'"),
    ],
)
def test_errors_say_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(name)
