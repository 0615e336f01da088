"""Which dimensions count, and that the monomials offered describe what layers hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lightning_mimose.predict.features import Basis, bases, varying_dims
from lightning_mimose.predict.padding import padded_bases, strided_bases

Size = dict[str, int]


def _bases(sizes: list[Size]) -> list[Basis]:
    return bases(varying_dims(sizes)[0], sizes)


def test_dimensions_that_are_always_equal_count_once() -> None:
    """The first of them stands for the others."""
    sizes = [{"batch": 8, "ids:1": n, "mask:1": n, "labels:1": n} for n in (5, 7, 9)]
    dims, relations = varying_dims(sizes)
    assert dims == ("ids:1",)
    assert [relation.name for relation in relations] == ["mask:1", "labels:1"]
    assert all(relation.holds({"batch": 8, "ids:1": 4, "mask:1": 4, "labels:1": 4}) for relation in relations)
    assert not any(relation.holds({"batch": 8, "ids:1": 4, "mask:1": 5, "labels:1": 3}) for relation in relations)


def test_dimensions_that_differ_once_are_told_apart() -> None:
    """Encoder and decoder lengths."""
    sizes = [{"batch": 8, "ids:1": n, "labels:1": m} for n, m in ((5, 5), (7, 7), (7, 9))]
    assert varying_dims(sizes) == (("ids:1", "labels:1"), ())


@pytest.mark.parametrize("law", [lambda n, m: 2 * n + 1, lambda n, m: n // 8, lambda n, m: n + m, lambda n, m: m - 3])
def test_dimensions_that_follow_from_others_are_left_out(law: Callable[[int, int], int]) -> None:
    """Edges of a grid, frames of a signal, a prompt with its answer: wherever it holds."""
    pairs = ((8, 9), (16, 5), (24, 7), (40, 31), (56, 6))
    (dims, (relation,)) = varying_dims([{"batch": 8, "x": n, "y": m, "z": law(n, m)} for n, m in pairs])
    assert (dims, relation.name) == (("x", "y"), "z")
    assert relation.holds({"batch": 8, "x": 80, "y": 13, "z": law(80, 13)})
    assert not relation.holds({"batch": 8, "x": 80, "y": 13, "z": law(80, 13) + 1})


def test_what_lies_between_two_sizes_does_not_follow() -> None:
    """Samples that fill no whole frame."""
    _, (relation,) = varying_dims([{"samples": 320 * n, "frames": n} for n in (24, 30, 41, 72)])
    assert relation.holds({"samples": 9600, "frames": 30})
    assert not relation.holds({"samples": 9700, "frames": 30})


def test_nothing_follows_from_the_batch_or_from_too_few_sizes() -> None:
    """Bytes that go with both would be a square; and two sizes always lie on a line."""
    assert varying_dims([{"batch": n, "x:1": 2 * n} for n in (4, 6, 9)]) == (("batch", "x:1"), ())
    assert varying_dims([{"x:1": n, "y:1": m} for n, m in ((4, 6), (8, 3))]) == (("x:1", "y:1"), ())


def test_constant_dimensions_are_left_out() -> None:
    """Channels, and the batch if it never varies."""
    assert varying_dims([{"batch": 8, "x:1": 3, "x:2": n} for n in (16, 24)]) == (("x:2",), ())


def test_nothing_varies() -> None:
    """One size: the only feature is the constant."""
    (basis, *_) = _bases([{"batch": 8, "x:1": 3}])
    assert basis.dims == ()
    assert basis.features({"batch": 8, "x:1": 3}).tolist() == [1.0]


def spanned(
    sizes: list[Size], law: Callable[[Size], float], offer: Callable[[list[Size]], list[Basis]] = _bases
) -> bool:
    """Whether some basis offered describes a law exactly, and predicts a size that it was not given."""
    unseen = {name: round(1.3 * max(size[name] for size in sizes)) for name in sizes[0]}
    target = np.array([law(size) for size in sizes])
    for basis in offer(sizes):
        design = np.array([basis.features(size) for size in sizes])
        if np.linalg.matrix_rank(design) < design.shape[1]:
            continue
        coefficients = np.linalg.lstsq(design, target, rcond=None)[0]
        if abs(basis.features(unseen) @ coefficients - law(unseen)) < 1e-6 * law(unseen):
            return True
    return False


TEXT = [{"batch": b, "ids:1": n} for b in (2, 4, 8) for n in (16, 24, 40, 64)]
PAIRS = [{"batch": b, "ids:1": n, "labels:1": m} for b in (2, 3, 4) for n in (16, 24, 40) for m in (8, 12, 36)]
ROWS = [{"batch": b, "d:1": k, "d:2": n} for b in (2, 3) for k in (2, 4, 5) for n in (8, 12, 36)]
ANSWERS = [{**size, "q:1": length} for size in ROWS for length in (9, 14, 20)]
IMAGES = [{"batch": b, "x:2": n, "x:3": m} for b in (2, 3, 4) for n in (16, 24, 40, 56) for m in (8, 12, 32, 48)]


@pytest.mark.parametrize(
    ("sizes", "law"),
    [
        (TEXT, lambda s: 100 + 7 * s["batch"] * s["ids:1"]),
        (TEXT, lambda s: 100 + s["batch"] * (5 + 7 * s["ids:1"] + 3 * s["ids:1"] ** 2)),
        (TEXT, lambda s: 50 + 4 * s["ids:1"] ** 2 + s["batch"] * (7 * s["ids:1"] + 3 * s["ids:1"] ** 2)),
        (PAIRS, lambda s: s["batch"] * (s["ids:1"] ** 2 + s["ids:1"] * s["labels:1"] + 2 * s["labels:1"] ** 2)),
        (IMAGES, lambda s: 10 + s["batch"] * s["x:2"] * s["x:3"]),
        (IMAGES, lambda s: 10 + s["batch"] * (s["x:2"] * s["x:3"] + (s["x:2"] * s["x:3"]) ** 2)),
        ([{"batch": n} for n in (20, 30, 47, 90)], lambda s: 10 + 5 * s["batch"] + 3 * s["batch"] ** 2),
        (TEXT, lambda s: 100 + s["batch"] * (5 + 7 * s["ids:1"] + 3 * s["ids:1"] ** 2) + 4 * s["batch"] ** 2),
        (ROWS, lambda s: s["batch"] * s["d:1"] * (5 + 7 * s["d:2"] + 3 * s["d:2"] ** 2)),
        (ANSWERS, lambda s: s["batch"] * (s["d:1"] * (7 * s["d:2"] + 3 * s["d:2"] ** 2) + s["q:1"] + s["q:1"] ** 2)),
    ],
    ids=[
        *("tokens", "attention", "position-bias", "encoder-decoder", "pixels", "attention-over-pixels"),
        *("all-against-all", "texts-against-texts", "several-texts", "several-texts-beside-one"),
    ],
)
def test_what_layers_hold_is_in_a_basis(sizes: list[Size], law: Callable[[Size], float]) -> None:
    """Linear layers, attention, a bias without the batch, cross attention, convolutions, attention over pixels.

    And losses that hold everything of a batch against everything else, and texts in rows of several.
    """
    assert spanned(sizes, law)


def test_bases_come_simplest_first_and_none_twice() -> None:
    """So that few sizes suffice where little varies."""
    offered = _bases(TEXT)
    assert len(offered[0].features(TEXT[0])) == min(len(basis.features(TEXT[0])) for basis in offered)
    assert len(set(offered)) == len(offered)


def test_one_of_two_lengths_is_rounded_up_and_nothing_else() -> None:
    """Neither sides of images, nor a length that is alone; nor to blocks that all of it lies in."""
    texts = [{"batch": 4, "ids:1": n, "labels:1": m} for n, m in ((70, 8), (100, 30), (40, 12))]
    offered = padded_bases(varying_dims(texts)[0], texts)
    assert all(basis.rounds for basis in offered)
    rounded = {granules for basis in offered for granules in basis.granules}
    assert rounded == {(1, 1), (64, 1), (32, 1), (16, 1), (8, 1), (1, 16), (1, 8)}
    images = [{"batch": 4, "image:2": n, "image:3": m} for n, m in ((70, 8), (100, 30), (40, 12))]
    assert not padded_bases(varying_dims(images)[0], images)
    assert not padded_bases(varying_dims(TEXT)[0], TEXT)


def test_features_stay_near_one() -> None:
    """However large the dimensions: the fit must not lose digits."""
    sizes = [{"batch": 64, "x:0": n} for n in (10**5, 10**6, 10**7)]
    for basis in _bases(sizes):
        assert max(basis.features(size).max() for size in sizes) <= 1.0 + 1e-3


def test_texts_in_rows_of_several_are_known_as_such() -> None:
    """Also with another text beside them: how many there are is no length that is rounded."""
    for sizes in (ROWS, ANSWERS):
        assert any(basis.counts for basis in _bases(sizes))
    assert not any(basis.counts for basis in _bases(PAIRS))


SOUNDS = [{"batch": b, "x:2": n} for b in (2, 3) for n in (40, 61, 83, 94, 107, 126, 150, 177, 193, 200)]


@pytest.mark.parametrize(
    ("kernels", "strides", "padding"),
    [
        ((3,), (2,), 1),
        ((3, 3), (2, 2), 1),
        ((3, 3, 3), (2, 2, 2), 1),
        ((4,), (4,), 0),
        ((3, 3), (2, 2), 0),
        ((10, 3, 3), (5, 2, 2), 0),
        ((7, 5), (3, 2), 1),
    ],
)
def test_what_strides_leave_is_in_a_basis(kernels: tuple[int, ...], strides: tuple[int, ...], padding: int) -> None:
    """Of one convolution or of several in a row, with attention over what the last one leaves."""

    def law(size: Size) -> float:
        length, held = size["x:2"], 5.0 * size["x:2"]
        for kernel, stride in zip(kernels, strides, strict=True):
            length = (length + 2 * padding - kernel) // stride + 1
            held += 7 * length
        return 100 + size["batch"] * (held + 3 * length**2)

    def offered(sizes: list[Size]) -> list[Basis]:
        dims, _ = varying_dims(sizes)
        columns = np.array([[law(size), 3.0 * size["batch"]] for size in sizes])
        return [
            *bases(dims, sizes),
            *strided_bases(dims, sizes, columns, np.array([size["x:2"] % 7 for size in sizes])),
        ]

    assert spanned(SOUNDS, law, offered)


def test_strides_are_of_a_single_length() -> None:
    """Not of two texts, nor of images."""
    for sizes in (PAIRS, IMAGES):
        assert not strided_bases(varying_dims(sizes)[0], sizes, np.ones((len(sizes), 1)), np.ones(len(sizes)))
