import numpy as np

from lightrl.seeding import mix_seed, prefix_state, prefix_states, uniform_array


def test_splitmix64_reference_values() -> None:
    """The finaliser of state 0 is the first output of SplitMix64 seeded with 0: 0xE220A8397B1DCDAF."""
    from lightrl.seeding import _splitmix64

    assert _splitmix64(0) == 0xE220A8397B1DCDAF


def test_every_part_and_its_place_matter() -> None:
    seeds = {mix_seed(1, 2), mix_seed(2, 1), mix_seed(1, 3), mix_seed(1), mix_seed(1, 2, 0), mix_seed(-1, 2)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) == mix_seed(1, 2)


def test_uniforms_fill_the_interval() -> None:
    draws = uniform_array(np.full(4000, prefix_state(7), dtype=np.uint64), np.arange(4000)).tolist()
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02  # standard error 0.0046
    buckets = [sum(k / 10 <= draw < (k + 1) / 10 for draw in draws) for k in range(10)]
    assert min(buckets) > 320  # 400 expected, standard deviation 19


def test_an_array_of_states_has_each_state() -> None:
    last = [0, 1, 17, 2**40, 2**62]
    states = prefix_states(np.uint64(prefix_state(3, 4)), np.array(last))
    assert states.tolist() == [prefix_state(3, 4, part) for part in last]
