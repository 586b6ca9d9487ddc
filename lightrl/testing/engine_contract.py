"""EngineContract: the tests that every engine must pass, as a class that pytest runs over any engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from lightrl.config import StrategyOptions
from lightrl.engines.base import Completion, EngineGroup, SamplingParams, WeightSyncError, create_engine, eos_ids
from lightrl.engines.colocated import ColocatedEngine, EngineStatus

PROMPTS = [[5, 9, 33], [7], [60, 2, 8, 41, 12, 3], [5, 9]]
EOS = 1
_TOLERANCE = 3e-5  # of a logprob in float32, because CPUs round differently


class _Numbers:
    """Decodes each token as its number, with a space on both sides."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {token} " for token in token_ids)


class EngineContract:
    """The tests for one engine. Subclass it in a test file and name the engine; pytest then runs the contract.

        class TestMyEngine(EngineContract):
            engine = "my_pkg.my_module:MyEngine"

    The engine is built once for the class, and each test must leave it as it was.
    """

    engine: ClassVar[str]
    options: ClassVar[StrategyOptions] = StrategyOptions()
    draws_by_seed: ClassVar[bool] = True  # the tokens of a sample depend on (seed, sample, token index) alone
    cuts_draws: ClassVar[bool] = True  # top-k and top-p count; False: they are refused
    constrains_draws: ClassVar[bool] = True  # min_new_tokens and penalties count; False: they are refused
    resumes_exactly: ClassVar[bool] = True  # a sample that is aborted and resumed ends as if it had not been stopped
    has_cache: ClassVar[bool] = True  # requests under way can go on with the keys and values of older weights

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
        """Makes the trainer's model, a random model of two layers."""
        folder: Path = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=98,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            bos_token_id=None,
            pad_token_id=0,
            initializer_range=0.3,  # far from uniform, so that a mistake shows in the logprobs
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return load(str(folder))

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, source: PreTrainedModel) -> Iterator[ColocatedEngine]:
        """Provides the engine, and the model whose logprobs it must reproduce."""
        engine = create_engine(
            cls.engine,
            source=source,
            tokenizer=None,
            options=cls.options,
            device=torch.device("cpu"),
            group=EngineGroup(),
        )
        colocated = ColocatedEngine(engine)
        yield colocated
        colocated.close()
        colocated.close()

    @pytest.fixture
    def ready(self, built: ColocatedEngine, source: PreTrainedModel) -> ColocatedEngine:
        """Provides the engine, awake and with the source's weights as version 3."""
        built.update_weights(weights_of(source), 3)
        built.wake()
        return built

    def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(
        self, ready: ColocatedEngine, source: PreTrainedModel
    ) -> None:
        for temperature in (1.0, 0.7):
            params = SamplingParams(max_new_tokens=12, temperature=temperature, ignore_eos=True)
            for item in ready.generate(PROMPTS, [params] * len(PROMPTS)):
                assert len(item.output_token_ids) == 12
                assert largest_difference(source, item, temperature) < _TOLERANCE
                assert item.versions == (3,) * 12

    def test_greedy_tokens_are_the_likeliest(self, ready: ColocatedEngine, source: PreTrainedModel) -> None:
        params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        for item in ready.generate(PROMPTS, [params] * len(PROMPTS)):
            logits = response_logits(source, item)
            assert logits.argmax(-1).tolist() == list(item.output_token_ids)

    def test_a_limit_of_the_draws_that_it_does_not_know_is_refused(self, ready: ColocatedEngine) -> None:
        cuts: list[dict[str, Any]] = [] if self.cuts_draws else [{"top_k": 2}, {"top_p": 0.3}]
        others: list[dict[str, Any]] = [] if self.constrains_draws else [{"min_new_tokens": 2}, {"presence_penalty": 1}]
        if not cuts and not others:
            pytest.skip(f"{self.engine} takes all limits")
        for setting in (*cuts, *others):
            with pytest.raises(ValueError, match=next(iter(setting))):
                ready.generate(PROMPTS[:1], [SamplingParams(max_new_tokens=4, **setting)])

    def test_top_k_and_top_p_leave_the_likeliest_tokens(self, ready: ColocatedEngine, source: PreTrainedModel) -> None:
        if not self.cuts_draws:
            pytest.skip(f"{self.engine} takes neither top-k nor top-p")
        plain = SamplingParams(max_new_tokens=12, ignore_eos=True, n=2, seed=3)
        for item in ready.generate([[7]], [replace(plain, top_k=2)]):
            for index, scores in enumerate(response_logits(source, item)):
                left, token = scores.topk(2), item.output_token_ids[index]
                assert token in left.indices
                assert abs(float(scores[token] - left.values.logsumexp(-1)) - item.logprobs[index]) < _TOLERANCE
        for item in ready.generate([[7]], [replace(plain, top_p=0.3)]):
            for scores, token in zip(response_logits(source, item), item.output_token_ids, strict=True):
                assert float(scores.softmax(-1)[scores > scores[token]].sum()) < 0.3 + _TOLERANCE

    def test_a_minimum_of_tokens_and_penalties_count_in_the_logprobs(
        self, ready: ColocatedEngine, source: PreTrainedModel
    ) -> None:
        if not self.constrains_draws:
            pytest.skip(f"{self.engine} takes no minimum and no penalties")
        greedy = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        (free,) = ready.generate(PROMPTS[:1], [greedy])
        first = free.output_token_ids[0]
        ends = sorted({first, *eos_ids(source)})
        params = replace(greedy, min_new_tokens=4, presence_penalty=2.0, stop_token_ids=(first,), ignore_eos=False)
        (item,) = ready.generate(PROMPTS[:1], [params])
        produced = list(item.output_token_ids)
        assert len(produced) >= 4
        for index, scores in enumerate(response_logits(source, item)):
            scores = scores.clone()
            scores[sorted(set(produced[:index]))] -= 2.0
            if index < 4:
                scores[ends] = -torch.inf
            assert int(scores.argmax()) == produced[index]
            assert abs(float(scores.log_softmax(-1)[produced[index]]) - item.logprobs[index]) < _TOLERANCE

    def test_samples_come_flat_in_the_order_of_the_prompts(self, ready: ColocatedEngine) -> None:
        params = [SamplingParams(max_new_tokens=4, n=count, seed=count) for count in (2, 1, 3, 1)]
        found = ready.generate(PROMPTS, params)
        assert [list(item.prompt_token_ids) for item in found] == [PROMPTS[i] for i in (0, 0, 1, 2, 2, 2, 3)]
        assert [item.sample_index for item in found] == [0, 1, 0, 0, 1, 2, 0]

    def test_a_seed_gives_the_same_tokens_in_any_batch(self, ready: ColocatedEngine) -> None:
        if not self.draws_by_seed:
            pytest.skip(f"{self.engine} draws from one stream for all requests")
        params = [SamplingParams(max_new_tokens=10, seed=10 + place, n=2) for place in range(len(PROMPTS))]
        together = ready.generate(PROMPTS, params)
        alone = [item for pair in zip(PROMPTS, params, strict=True) for item in ready.generate([pair[0]], [pair[1]])]
        assert [item.output_token_ids for item in together] == [item.output_token_ids for item in alone]
        assert len({item.output_token_ids for item in together}) == len(together)
        first, second = ready.generate(PROMPTS[:1], [SamplingParams(max_new_tokens=10, seed=10, first_sample=1)]), alone
        assert first[0].output_token_ids == second[1].output_token_ids
        assert first[0].sample_index == 1

    def test_a_sample_ends_by_a_stop_token_or_by_length(self, ready: ColocatedEngine) -> None:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        (whole,) = ready.generate(PROMPTS[:1], [params])
        assert whole.finish_reason == "length"
        stop = whole.output_token_ids[3]
        place = whole.output_token_ids.index(stop)
        (cut,) = ready.generate(
            PROMPTS[:1], [SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))]
        )
        assert cut.finish_reason == "stop"
        assert cut.output_token_ids == whole.output_token_ids[: place + 1]  # the stop token is kept

    def test_a_stop_string_ends_a_sample_with_all_that_belongs_to_its_tokens(self, ready: ColocatedEngine) -> None:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        (whole,) = ready.generate(PROMPTS[:1], [params])
        tokens = whole.output_token_ids
        pairs = list(pairwise(tokens))
        length = pairs.index(pairs[3]) + 2  # the pair may come earlier
        ready.tokenizer = _Numbers()
        (cut,) = ready.generate(PROMPTS[:1], [replace(params, stop=(_Numbers().decode(tokens[3:5]),))])
        assert (cut.output_token_ids, cut.finish_reason) == (tokens[:length], "stop")  # two tokens complete it
        assert len(cut.logprobs) == len(cut.versions) == length < 8
        assert cut.logprobs == pytest.approx(whole.logprobs[:length], abs=_TOLERANCE)

    def test_the_models_own_end_token_ends_a_sample(self, ready: ColocatedEngine) -> None:
        samples = SamplingParams(max_new_tokens=100, n=16, seed=4)
        ended = [item for item in ready.generate([[5]], [samples]) if item.finish_reason == "stop"]
        assert ended
        assert all(item.output_token_ids.index(EOS) == len(item.output_token_ids) - 1 for item in ended)

    def test_an_aborted_sample_keeps_what_it_has_and_can_go_on(
        self, ready: ColocatedEngine, source: PreTrainedModel
    ) -> None:
        params = SamplingParams(max_new_tokens=24, seed=8, ignore_eos=True)
        (whole,) = ready.generate(PROMPTS[:1], [params])
        ready.submit(PROMPTS[0], params)
        other = ready.submit(PROMPTS[1], SamplingParams(max_new_tokens=24, ignore_eos=True))
        for _ in range(3):
            assert ready.step() == []
        stopped = ready.abort()
        assert not ready.has_unfinished()
        partial = next(item for item in stopped if item.request_id != other)
        assert len(stopped) == 2
        assert partial.finish_reason == "abort"
        assert 0 < len(partial.output_token_ids) == len(partial.logprobs) < 24
        ready.submit(PROMPTS[0], params, partial)
        (resumed,) = finish(ready)
        assert len(resumed.output_token_ids) == 24
        assert list(resumed.prompt_token_ids) == PROMPTS[0]
        assert resumed.output_token_ids[: len(partial.output_token_ids)] == partial.output_token_ids
        assert largest_difference(source, resumed) < _TOLERANCE
        if self.resumes_exactly:
            assert resumed.output_token_ids == whole.output_token_ids

    def test_requests_under_way_go_on_with_new_weights(
        self, ready: ColocatedEngine, source: PreTrainedModel, changed: PreTrainedModel
    ) -> None:
        for recompute in (True, False):
            ready.update_weights(weights_of(source), 3)
            request = ready.submit(PROMPTS[0], SamplingParams(max_new_tokens=30, seed=2, ignore_eos=True))
            for _ in range(3):
                ready.step()
            report = ready.update_weights(weights_of(changed), 4, recompute_kv=recompute)
            assert (report.version, report.num_bytes) == (4, sum(p.nbytes for _, p in weights_of(changed)))
            (item,) = finish(ready)
            assert item.request_id == request
            before = item.versions.count(3)
            assert item.versions == (3,) * before + (4,) * (30 - before)
            assert 0 < before < 30
            old = difference(source, item)[:before]
            new = difference(changed, item)[before:]
            assert float(old.max()) < _TOLERANCE
            is_recomputed = recompute or not self.has_cache  # else the context is that of the old weights
            assert (float(new.max()) < _TOLERANCE) is is_recomputed
        fresh = ready.generate(PROMPTS[:1], [SamplingParams(max_new_tokens=6)])
        assert largest_difference(changed, fresh[0]) < _TOLERANCE  # a new request uses no cache of older weights

    @pytest.fixture(scope="class")
    @classmethod
    def changed(cls, source: PreTrainedModel) -> PreTrainedModel:
        """Returns the trainer's model after some training."""
        model = load(str(source.name_or_path))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    def test_new_weights_are_used_at_once_and_wrong_ones_are_named(
        self, ready: ColocatedEngine, changed: PreTrainedModel
    ) -> None:
        ready.update_weights(weights_of(changed), 4)
        for item in ready.generate(PROMPTS, [SamplingParams(max_new_tokens=6, ignore_eos=True)] * len(PROMPTS)):
            assert largest_difference(changed, item) < _TOLERANCE
        good = weights_of(changed)
        name, tensor = next((n, t) for n, t in good if n.endswith("layers.1.mlp.down_proj.weight"))
        others = [pair for pair in good if pair[0] != name]
        for sent, culprit in (
            (others, name),
            ([*others, (name, tensor[:, :3])], name),
            ([*good, ("model.layers.7.mlp.down_proj.weight", tensor)], "model.layers.7.mlp.down_proj.weight"),
        ):
            consumed: list[str] = []
            with pytest.raises(WeightSyncError, match=culprit):
                ready.update_weights(watched(sent, consumed), 5)
            assert len(consumed) == len(sent)  # on other ranks they may come out of collectives
            with pytest.raises(RuntimeError, match="no weights yet"):
                ready.generate(PROMPTS[:1], [SamplingParams()])
        ready.update_weights(good, 6)
        assert ready.generate(PROMPTS[:1], [SamplingParams()])[0].versions[0] == 6

    def test_sleep_and_wake(self, ready: ColocatedEngine, source: PreTrainedModel) -> None:
        greedy = [SamplingParams(max_new_tokens=6, temperature=0.0)]
        (before,) = ready.generate(PROMPTS[:1], greedy)
        for level in ready.engine.sleep_levels:
            assert ready.sleep(level) >= 0
            assert ready.sleep(level) == 0
            assert not is_awake(ready)
            with pytest.raises(RuntimeError, match="The engine is asleep"):
                ready.generate(PROMPTS[:1], greedy)
            if level == 2:
                ready.wake()
                with pytest.raises(RuntimeError, match="no weights yet"):
                    ready.generate(PROMPTS[:1], greedy)
                ready.sleep(level)
            if level == 2:
                ready.update_weights(weights_of(source), 3)  # wakes the weights only
                assert not is_awake(ready)
            ready.wake()
            ready.wake()
            assert is_awake(ready)
            assert ready.generate(PROMPTS[:1], greedy)[0].output_token_ids == before.output_token_ids

    def test_a_sample_goes_on_after_a_sleep(self, ready: ColocatedEngine) -> None:
        params = SamplingParams(max_new_tokens=24, seed=11, ignore_eos=True)
        (undisturbed,) = ready.generate([PROMPTS[1]], [params])
        request_id = ready.submit(PROMPTS[1], params)
        for _ in range(4):
            ready.step()
        ready.sleep()
        assert ready.has_unfinished()
        ready.wake()
        (resumed,) = finish(ready)
        assert resumed.request_id == request_id
        assert len(resumed.output_token_ids) == 24
        if self.resumes_exactly:
            assert resumed.output_token_ids == undisturbed.output_token_ids
        ready.submit(PROMPTS[1], params)
        ready.step()
        ready.sleep()
        assert [item.finish_reason for item in ready.abort()] == ["abort"]
        assert not ready.has_unfinished()
        ready.wake()

    def test_what_would_hang_or_kill_an_engine_is_refused_by_name(self, ready: ColocatedEngine) -> None:
        params = SamplingParams(max_new_tokens=4)
        for bad, text in (
            ([], "prompt 1 is empty"),
            ([3, 98], "prompt 1 holds token id 98, outside the model's vocabulary of 98"),
            ([3] * 125, "prompt 1 has 125 tokens"),
        ):
            with pytest.raises(ValueError, match=text):
                ready.generate([PROMPTS[0], bad], [params, params])
        with pytest.raises(ValueError, match=f"adapter 'nobody'. This engine has {', '.join(ready.engine.adapters)}"):
            ready.generate(PROMPTS[:1], [replace(params, adapter="nobody")])
        assert len(ready.generate(PROMPTS[:1], [params])) == 1  # and it still works

    def test_the_longest_prompt_fits(self, ready: ColocatedEngine, source: PreTrainedModel) -> None:
        prompt = [place % 90 + 3 for place in range(124)]
        (item,) = ready.generate([prompt], [SamplingParams(max_new_tokens=4, ignore_eos=True)])
        assert len(item.output_token_ids) == 4
        assert largest_difference(source, item) < _TOLERANCE


def load(folder: str) -> PreTrainedModel:
    """Loads the model of a folder in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def is_awake(engine: ColocatedEngine) -> bool:
    """Returns whether the engine can generate."""
    return engine.status is EngineStatus.WAKEUP


def weights_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Returns the weights as a strategy sends them: sorted by name, tied ones once."""
    return sorted((name, parameter.detach().clone()) for name, parameter in model.named_parameters())


def watched(pairs: list[tuple[str, Tensor]], consumed: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the pairs and appends the name of each one that is consumed."""
    for name, tensor in pairs:
        consumed.append(name)
        yield name, tensor


def finish(engine: ColocatedEngine) -> list[Completion]:
    """Steps the engine until no request is left, and returns all completions."""
    done: list[Completion] = []
    while engine.has_unfinished():
        done.extend(engine.step())
    return done


@torch.no_grad()
def response_logits(model: Any, item: Completion) -> Tensor:
    """Returns the model's logits for each response token, [tokens, vocabulary]."""
    ids = torch.tensor([[*item.prompt_token_ids, *item.output_token_ids]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(item.prompt_token_ids) - 1 : -1]
    return logits.float()


def difference(model: Any, item: Completion, temperature: float = 1.0) -> Tensor:
    """Returns |engine - model| of each logprob."""
    scores = (response_logits(model, item) / temperature).log_softmax(-1)
    theirs = scores.gather(1, torch.tensor(item.output_token_ids)[:, None])[:, 0]
    return (theirs - torch.tensor(item.logprobs)).abs()


def largest_difference(model: Any, item: Completion, temperature: float = 1.0) -> float:
    """Returns the largest difference between a logprob and that of the model."""
    return float(difference(model, item, temperature).max())
