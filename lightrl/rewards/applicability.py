"""Limits rewards to some records (--reward_for): for the samples of all others, a reward gives None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from lightrl.config import nearest_name
from lightrl.records import Sample, inner_value
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardError, RewardRunner, not_judged

Located = tuple[Mapping[str, Any], str]  # a record, and its file and line

_MOST_SHOWN = 10  # values of a field in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on the fields of a record."""

    allowed: Mapping[str, Sequence[str]]  # the values of each field, of which a record must have one

    def admits(self, record: Mapping[str, Any]) -> bool:
        """Returns whether each field of the record has one of its values."""
        return all(_text(inner_value(record, field)) in values for field, values in self.allowed.items())

    def __str__(self) -> str:
        return " and ".join(f"{field} is {' or '.join(values)}" for field, values in self.allowed.items())


def _text(value: Any) -> str | None:
    """Returns a field's value as an option spells it: true for True, and None for a field that is missing."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def conditions_of(items: Sequence[str], labels: Sequence[str]) -> dict[str, Condition]:
    """Reads texts of the form reward.field=value; returns the condition of each reward that they name."""
    allowed: dict[str, dict[str, list[str]]] = {}
    for item in items:
        path, separator, value = item.partition("=")
        label, _, field = path.partition(".")
        if not (separator and field and value):
            raise ValueError(f"--reward_for {item!r}: it must be reward.field=value, such as math.data_source=gsm8k.")
        if label not in labels:
            raise ValueError(f"--reward_for {item!r}: --reward has no {label!r}. {nearest_name(label, set(labels))}")
        values = allowed.setdefault(label, {}).setdefault(field, [])
        if value in values:
            raise ValueError(f"--reward_for {item} is given twice.")
        values.append(value)
    return {label: Condition(allowed=fields) for label, fields in allowed.items()}


def fail_unjudged(
    samples: Sequence[Sample], outcomes: Mapping[str, list[Outcome]], conditions: Mapping[str, Condition] | None = None
) -> list[RewardError]:
    """Puts an error into the outcomes of every sample to which no reward applies, and returns these errors."""
    purposes = {label: f"is for records whose {condition}" for label, condition in (conditions or {}).items()}
    errors = []
    for index, sample in enumerate(samples):
        if all(part[index] is None for part in outcomes.values()):
            errors.append(error := not_judged({label: purposes.get(label, "") for label in outcomes}, sample))
            for part in outcomes.values():
                part[index] = error
    return errors


# ---- Rewards that judge some samples ---------------------------------------------------------------------------------


class SelectiveRunner(RewardRunner):
    """A runner that gives its reward only the samples of the records that it is for."""

    def __init__(self, runner: RewardRunner, condition: Condition) -> None:
        super().__init__(runner.reward, runner.kind, runner.limits, runner.name)
        self._runner, self._condition = runner, condition

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns the runner's outcomes, and None for the samples of other records."""
        is_chosen = _are_admitted(samples, self._condition)
        return _spread(is_chosen, self._runner.run(list(compress(samples, is_chosen)), budget), budget)

    async def arun(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Does what run() does without blocking the calling event loop, if the runner can."""
        is_chosen = _are_admitted(samples, self._condition)
        return _spread(is_chosen, await self._runner.arun(list(compress(samples, is_chosen)), budget), budget)

    def close(self) -> None:
        """Ends the runner."""
        self._runner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveTogether:
    """A reward that all ranks compute together, on the samples of the records that it is for."""

    reward: Any
    condition: Condition
    is_collective = True

    @property
    def works_apart(self) -> bool:
        """Whether a rank can compute the reward by itself."""
        return bool(self.reward.works_apart)

    def prepare(self, strategy: Any) -> None:
        """Loads the reward; every rank calls it."""
        self.reward.prepare(strategy)

    def __call__(self, samples: Sequence[Sample], /) -> list[Outcome]:
        is_chosen = _are_admitted(samples, self.condition)
        return _spread(is_chosen, self.reward(list(compress(samples, is_chosen))), FailureBudget())


def _are_admitted(samples: Sequence[Sample], condition: Condition) -> list[bool]:
    return [condition.admits(sample.prompt.fields) for sample in samples]


def _spread(is_chosen: Sequence[bool], outcomes: Sequence[Outcome], budget: FailureBudget) -> list[Outcome]:
    """Returns the outcomes of the chosen samples, with None in the places of the others, which are counted."""
    budget.num_left_out += len(is_chosen) - len(outcomes)
    given = iter(outcomes)
    return [next(given) if chosen else None for chosen in is_chosen]


# ---- Checks when the data is read ------------------------------------------------------------------------------------


def require_readable(conditions: Mapping[str, Condition], taken: Sequence[str]) -> None:
    """Raises ValueError for a field that is among the taken ones, which a reward does not find with the others."""
    for label, condition in conditions.items():
        for field in condition.allowed:
            if field in taken:
                raise ValueError(
                    f"--reward_for {label}.{field}: the field holds the prompt or the answer. Name one of the others."
                )


def require_values(conditions: Mapping[str, Condition], records: Sequence[Located]) -> None:
    """Raises ValueError for a value that no record has."""
    for field in dict.fromkeys(field for condition in conditions.values() for field in condition.allowed):
        found = {_text(inner_value(record, field)): None for record, _ in records}
        for label, condition in conditions.items():
            for value in condition.allowed.get(field, ()):
                if value not in found:
                    shown = [repr(name) for name in found if name is not None]
                    others = ", ..." if len(shown) > _MOST_SHOWN else ""
                    raise ValueError(
                        f"--reward_for {label}.{field}={value}: no record has this value. There are "
                        f"{', '.join(shown[:_MOST_SHOWN])}{others}."
                    )


def require_judges(conditions: Mapping[str, Condition], labels: Sequence[str], records: Sequence[Located]) -> None:
    """Raises ValueError for a record that no reward is for."""
    if not conditions.keys() >= set(labels):
        return  # a reward without a condition judges every record
    for record, where in records:
        if not any(condition.admits(record) for condition in conditions.values()):
            wanted = "; ".join(f"{label} if {condition}" for label, condition in conditions.items())
            raise ValueError(
                f"{where}: no reward is for this record. --reward_for gives {wanted}. Add the record's value there, or "
                "leave such records out."
            )
