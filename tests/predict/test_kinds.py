"""Kinds of step, and in which steps they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mimose.predict.kinds import MOST_COUNTS, MOST_KINDS, MOST_SIZES, STEADY, Kinds
from lightning_mimose.sizes import BatchSize

CountOf = Callable[[int, int, int], int]
"""Step, place in the epoch and size -> how many operations it has."""
MANY = 1_000_000


def over(sizes: int, step: int) -> int:
    """One size after the other."""
    return step % sizes


def followed(
    count_of: CountOf,
    steps: int = 200,
    epoch: int = MANY,
    size_of: Callable[[int], int] = lambda step: step * 7 % 61,
    path_of: Callable[[int], Hashable] = lambda _: None,
) -> tuple[list[int], list[int], list[int], Kinds]:
    """Steps that turned out to be of another kind than was foreseen, those after which all is learnt anew, and doubts.

    Args:
        count_of: See `CountOf`.
        steps: How many there are.
        epoch: How many of them are one.
        size_of: Step -> size.
        path_of: Step -> what stands for the units that it calls.
    """
    kinds, strange, renewed, doubted = Kinds(), list[int](), list[int](), list[int]()
    for step in range(steps):
        place, size = step % epoch, size_of(step)
        foreseen = kinds.foresee(step, place)
        seen = kinds.saw(step, place, size, count_of(step, place, size), path_of(step))
        strange += [step] if seen.kind not in (None, foreseen) else []
        renewed += [step] if seen.renews else []
        doubted += [step] if seen.doubts else []
    return strange, renewed, doubted, kinds


@given(every=st.integers(2, 40), first=st.integers(0, 40))
def test_what_comes_in_every_so_many_th_step_is_foreseen_from_its_third_time_on(every: int, first: int) -> None:
    """Which of them comes less often is not known before the first few."""
    for sizes in (1, 5, 61):
        strange, renewed, _, _ = followed(
            lambda step, *_: 90 if step % every == first % every else 70,
            size_of=lambda step, sizes=sizes: step * 7 % sizes,  # type: ignore[misc]
        )
        times = [step for step in range(200) if step % every == first % every][:2]
        assert set(strange) <= {*times, times[0] + 1, *(range(2 * STEADY) if every < STEADY else ())}
        assert len(renewed) <= 1


@given(every=st.integers(3, 12), first=st.integers(0, 12), seed=st.integers(0, 10_000))
def test_sizes_that_come_again_do_not_hide_a_kind(every: int, first: int, seed: int) -> None:
    """Where a size has told already which number it has, the step counts towards the pattern all the same."""
    chance = random.Random(seed)
    sizes = [chance.choice(range(12, 96, 4)) for _ in range(200)]
    _, _, _, kinds = followed(
        lambda step, *_: 90 if step % every == first % every else 70, size_of=lambda step: sizes[step]
    )
    assert kinds.follows
    for step in range(200, 200 + every):
        assert (kinds.foresee(step, step) != kinds.usual) == (step % every == first % every)


@pytest.mark.parametrize("where", [0, 10, 24])
def test_one_step_of_every_epoch_is_foreseen(where: int) -> None:
    """The first, or the last that logs something."""
    strange, _, _, _ = followed(lambda _, place, __: 90 if place == where else 70, epoch=25)
    assert set(strange) <= {where, where + 1, where + 25}


def test_what_goes_by_the_place_in_an_epoch_and_what_goes_by_the_step_are_told_apart() -> None:
    """Epochs are no whole number of periods: which of the two it is shows in the third."""
    for count_of in (
        lambda step, place, _: 90 if step % 10 == 9 else 70,
        lambda step, place, _: 90 if place % 10 == 9 else 70,
    ):
        strange, _, _, _ = followed(count_of, 400, epoch=45)
        assert [step for step in strange if step >= 100] == []


def test_another_loss_from_some_step_on_is_strange_once() -> None:
    """Whatever the sizes, as long as they do not decide; and a few times when it is gone."""
    for sizes in (1, 5, 19):
        size_of = partial(over, sizes)
        assert followed(lambda step, *_: 70 if step < 20 else 90, size_of=size_of)[:2] == ([20], [])
        strange, *_ = followed(lambda step, *_: 70 if not 20 <= step < 60 else 90, size_of=size_of)
        assert len(strange) <= 3


def test_another_number_at_new_sizes_is_doubted_and_may_go_by_the_size() -> None:
    """As where batches of some lengths are padded: that is no kind of step."""
    strange, renewed, doubted, kinds = followed(
        lambda _, __, size: 70 if size < 20 else 73, 60, size_of=lambda step: step
    )
    assert (strange, renewed, doubted) == ([], [], [20])
    assert kinds.foresee(60, 60) == 0
    for every in (2, 4, 16):
        chance = random.Random(every)
        strange, renewed, _, _ = followed(
            lambda _, __, size, every=every: 70 + 3 * (size % every > 0),  # type: ignore[misc]
            400,
            size_of=lambda _, chance=chance: chance.randrange(400),  # type: ignore[misc]
        )
        assert len(strange) <= 8
        assert not renewed


@pytest.mark.parametrize(
    "is_rare",
    [
        lambda step: step % 8 in (6, 7),
        lambda step: step % 6 > 2,
        lambda step: step % 12 in (1, 5, 6),
    ],
)
def test_several_in_a_row_are_foreseen(is_rare: Callable[[int], bool]) -> None:
    """And what comes at uneven distances, over and over."""
    strange, _, _, kinds = followed(lambda step, *_: 90 if is_rare(step) else 70)
    assert [step for step in strange if step > 30] == []
    assert [kinds.foresee(step, step) == 1 for step in range(200, 206)] == [is_rare(step) for step in range(200, 206)]


def test_many_losses_in_turns_are_as_many_kinds() -> None:
    """Each is foreseen."""
    strange, _, _, kinds = followed(lambda step, *_: 70 + 7 * (step % 5))
    assert [step for step in strange if step > 20] == []
    assert len({kinds.foresee(step, step) for step in range(200, 205)}) == 5


def test_steps_that_tell_nothing_shift_no_pattern() -> None:
    """Batches without a loss, or that run again: they count as steps all the same."""
    chance, kinds, strange = random.Random(0), Kinds(), 0
    for step in range(2000):
        foreseen = kinds.foresee(step, step)
        if chance.random() < 0.01:
            continue
        seen = kinds.saw(step, step, step * 7 % 61, 90 if step % 10 == 9 else 70)
        strange += step > 100 and seen.kind not in (None, foreseen)
    assert kinds.follows
    assert strange <= 8


def test_a_period_that_becomes_another_is_found_again() -> None:
    """Twice as long, say."""
    strange, *_ = followed(lambda step, *_: 90 if step % (10 if step < 100 else 20) == 0 else 70, 600)
    assert [step for step in strange if step > 300] == []


def test_kinds_that_come_together_are_three_kinds() -> None:
    """A loss in every fourth step and another one in every sixteenth."""
    strange, *_ = followed(lambda step, *_: 70 + 20 * (step % 4 == 0) + 7 * (step % 16 == 0), 400)
    assert [step for step in strange if step > 48] == []


def test_what_comes_by_chance_is_doubted_and_soon_no_more_foreseen() -> None:
    """A false guess costs a step."""
    chance = random.Random(0)
    strange, renewed, doubted, _ = followed(lambda *_: 90 if chance.random() < 0.1 else 70, 400)
    assert len(strange) < 12
    assert not renewed
    assert doubted
    assert doubted[-1] > 350


def test_layers_that_are_left_out_by_chance_are_not_followed_for_long() -> None:
    """Their number of operations is one of a few."""
    for sizes in (61, 1):
        chance = random.Random(1)
        strange, renewed, _, _ = followed(
            lambda *_, chance=chance: 70 - 9 * sum(chance.random() < 0.1 for _ in range(6)),  # type: ignore[misc]
            400,
            size_of=lambda step, sizes=sizes: step * 7 % sizes,  # type: ignore[misc]
        )
        assert len(strange) < 24
        assert [step for step in strange if step > 300] == []
        assert len(renewed) <= 2


def test_a_loop_over_what_a_batch_holds_tells_nothing() -> None:
    """Its number goes by the size, or by chance."""
    assert followed(lambda _, __, size: 2 + size)[:3] == ([], [], [])
    assert followed(lambda _, __, size: 2 + size, size_of=lambda step: step % 5)[:3] == ([], [], [])
    chance = random.Random(0)
    *_, kinds = followed(lambda *_: chance.randint(1, 1000))
    assert not kinds.follows


def test_where_it_goes_by_the_size_another_one_of_the_same_size_is_told() -> None:
    """But only so often, for it may be chance."""
    _, renewed, doubted, _ = followed(lambda step, _, size: size + 9 * (step > 30), size_of=lambda step: step % 4)
    assert renewed == doubted == [31]
    _, renewed, _, _ = followed(lambda step, _, size: size + 100 * step, 30, size_of=lambda step: step % 4)
    assert len(renewed) <= 2


def test_if_the_first_step_is_of_the_rarer_kind_what_it_taught_is_none_of_the_others() -> None:
    """A loss in every tenth step, from the first one on."""
    kinds = Kinds()
    seen = [kinds.saw(step, step, step, 90 if step % 10 == 0 else 70) for step in range(12)]
    assert [step for step, each in enumerate(seen) if each.mixed] == [2]
    assert seen[2].mixed == {0}


def test_what_was_learnt_of_a_kind_before_it_was_known_is_named() -> None:
    """Its sizes, but for the latest, of which nothing is learnt."""
    kinds = Kinds()
    seen = [kinds.saw(step, step, step % 4, 90 if step in (3, 9) else 70) for step in range(10)]
    assert [step for step, each in enumerate(seen) if each.mixed] == [9]
    assert seen[9].mixed == {3}


def test_it_does_not_remember_more_and_more() -> None:
    """Of ever new sizes and numbers."""
    for count_of in (lambda step, *_: step, lambda step, *_: step % (2 * MOST_KINDS), lambda *_: 1):
        *_, kinds = followed(count_of, 3 * MOST_SIZES, size_of=lambda step: step)
        assert len(kinds._counts) <= MOST_COUNTS + 1
        assert len(kinds._sizes) <= MOST_SIZES


def test_numbers_of_a_few_sizes_that_come_again_and_again_are_none() -> None:
    """Texts of one to six chunks: their size tells, also where one of them came every second time for a while."""
    order = (4, 4, 1, 3, 5, 4, 4, 3, 4, 3, 5, 2, 5, 2, 3, 2, 1, 5, 3, 5, 6, 5, 2, 3, 1, 6, 1, 6, 3, 4, 5, 1, 3, 4, 3, 5)
    strange, renewed, doubted, kinds = followed(
        lambda step, place, size: 20 * size, steps=len(order), size_of=lambda step: order[step]
    )
    assert (strange, renewed, doubted) == ([], [], [])
    assert not any(kinds.is_sure(index) for index in range(1, MOST_KINDS))


def test_what_batches_of_one_have_is_no_kind() -> None:
    """They come by chance, and their size tells; hardly ever so regularly that they are taken for one."""
    never = 0
    for seed in range(60):
        chance, kinds, foreseen = random.Random(seed), Kinds(), set()
        for step in range(60):
            size = BatchSize((("batch", chance.randint(1, 4)), ("tokens", chance.randint(32, 128))))
            foreseen.add(kinds.foresee(step, step))
            kinds.saw(step, step, size, 66 if size.dims[0] == ("batch", 1) else 65)
        never += len(foreseen) == 1
    assert never >= 54


def test_what_goes_by_the_sides_of_images_is_no_kind() -> None:
    """Windows of 4 by 4 at three levels pad what is no multiple: no range of sizes tells how many, but sides do."""
    taken_for_others = []
    for seed in range(40):
        chance, kinds = random.Random(seed), Kinds()
        for step in range(80):
            height, width = (16 * chance.randint(4, 8) for _ in range(2))
            padded = sum((height % side > 0) + (width % side > 0) for side in (32, 64, 128))
            size = BatchSize((("batch", chance.randint(2, 4)), ("x:1", 3), ("x:2", height), ("x:3", width)))
            taken_for_others += [step] if kinds.foresee(step, step) else []
            kinds.saw(step, step, size, 400 + padded)
        assert not any(kinds.is_sure(index) for index in range(1, MOST_KINDS))
    assert len(taken_for_others) <= 40 * 4
    assert max(taken_for_others) < 40


@pytest.mark.parametrize("every", [3, 5, 8])
def test_a_loss_beside_sizes_that_come_again_in_part_is_a_kind(every: int) -> None:
    """Sizes without their batch come again with other numbers, so it does not go by them."""
    chance, kinds, wrong = random.Random(every), Kinds(), list[int]()
    for step in range(120):
        size = BatchSize((("batch", chance.randint(2, 9)), ("x:2", 16 * chance.randint(4, 8))))
        foreseen = kinds.foresee(step, step)
        seen = kinds.saw(step, step, size, 90 if step % every == 0 else 70)
        wrong += [step] if seen.kind not in (None, foreseen) else []
    assert not [step for step in wrong if step > 60]
    assert kinds.is_sure(1)


def test_a_kind_whose_batches_are_larger_is_foreseen_once_it_is_proven() -> None:
    """Every fifth step has another loss, and batches of its own."""
    kinds, wrong = Kinds(), []
    for step in range(60):
        other = step % 5 == 4
        size = BatchSize((("batch", 8 if other else 4), ("tokens", 32 + step * 7 % 61)))
        foreseen = kinds.foresee(step, step)
        seen = kinds.saw(step, step, size, 90 if other else 70)
        wrong += [step] if seen.kind not in (None, foreseen) else []
    assert not [step for step in wrong if step > 40]
    assert kinds.is_sure(1)


@pytest.mark.parametrize("sizes", [1, 5, 61])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
@given(seed=st.integers(0, 10_000))
def test_blocks_that_are_left_out_by_chance_make_no_kinds(sizes: int, share: float, seed: int) -> None:
    """Whatever is foreseen comes by chance; the units that were called tell why the number is another one."""
    chance = random.Random(seed)
    left_out = [tuple(chance.random() < share for _ in range(6)) for _ in range(300)]
    strange, renewed, *_ = followed(
        lambda step, *_: 70 - 9 * sum(left_out[step]), 300, 50, partial(over, sizes), left_out.__getitem__
    )
    assert not renewed
    assert len(strange) <= 6


@pytest.mark.parametrize("epoch", [MANY, 40])
def test_one_head_of_several_by_chance_makes_no_kind(epoch: int) -> None:
    """As above, in trainings with one size and with many."""
    found = []
    for seed in range(40):
        chance = random.Random(seed)
        heads = [chance.randrange(3) for _ in range(200)]
        strange, renewed, _, _ = followed(
            lambda step, *_, heads=heads: 70 + 7 * heads[step],  # type: ignore[misc]
            epoch=epoch,
            size_of=partial(over, 1 + seed % 5),
            path_of=heads.__getitem__,
        )
        assert not renewed
        found.append(len(strange))
    assert sum(map(bool, found)) <= 4


@pytest.mark.parametrize("every", [2, 3, 5, 10])
def test_tasks_in_turns_are_foreseen_in_the_end(every: int) -> None:
    """Their units tell them apart as well, but which one comes next is more than chance."""
    strange, renewed, _, kinds = followed(
        lambda step, *_: 90 if step % every == 0 else 70, path_of=lambda step: step % every == 0
    )
    assert not renewed
    assert len(strange) <= 2
    foreseen = [(step % every == 0, kinds.foresee(step, step)) for step in range(200, 200 + every)]
    assert len(set(foreseen)) == len({kind for _, kind in foreseen}) == 2


def test_a_loss_that_is_added_beside_blocks_by_chance_is_a_kind() -> None:
    """Of the same units, steps with it and without are told apart."""
    chance = random.Random(1)
    left_out = [chance.random() < 0.1 for _ in range(400)]
    strange, *_ = followed(
        lambda step, *_: 70 - 9 * left_out[step] + 20 * (step % 8 == 0), 400, path_of=left_out.__getitem__
    )
    assert len([step for step in strange if step > 40]) <= 12
