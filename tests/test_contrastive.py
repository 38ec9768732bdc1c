"""Contrastive losses on odd batches: the stated result, or an error that names the cause."""
import math

import pytest
import torch

from facenb.circle import Circle
from facenb.contrastive import NTXent, SupCon
from facenb.diagnostics import alignment, uniformity
from facenb.interface import LOSSES
from facenb.pairwise import NPair, SigLIP
from facenb.triplet import MINING, Triplet

MAKE = {"supcon": SupCon, "ntxent": NTXent, "npair": NPair, "siglip": SigLIP, "circle": Circle} | {
    f"triplet {mining}": lambda mining=mining: Triplet(mining=mining) for mining in MINING}
PAIRED = {"npair", "siglip"}  # need rows 2i and 2i+1 of one person
LENGTH_COUNTS = {"npair"}
every = pytest.mark.parametrize("name", MAKE)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here"))])


def batch(pairs: int = 6, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    "Embeddings of people who appear twice, in adjacent rows, and their labels"
    random = torch.Generator().manual_seed(0)
    z = torch.randn(2 * pairs, 8, dtype=torch.float64, generator=random)
    return z.to(dtype), torch.arange(pairs).repeat_interleave(2)


def learn(name: str, z: torch.Tensor, labels: torch.Tensor):
    "Loss, what was seen, gradient; with the loss as precise as the embeddings, float32 at least"
    z = z.clone().requires_grad_()
    precision = torch.float64 if z.dtype == torch.float64 else torch.float32
    loss = MAKE[name]().to(device=z.device, dtype=precision)
    value, seen = loss(z, labels)
    value.backward()
    return value.detach(), seen, z.grad


@every
@devices
def test_sensible_batch_gives_numbers_and_a_gradient(name, device):
    z, labels = batch()
    value, seen, gradient = learn(name, z.to(device), labels)  # labels may stay on the CPU
    assert value.device.type == device and value > 0
    assert gradient.isfinite().all() and gradient.norm() > 0
    assert not any(number.requires_grad for number in seen.values())
    assert seen["negatives"] == (5 if name in PAIRED else 10)
    assert 0 <= seen["hits"] <= 1 and seen["zeros"] == 0
    assert math.isclose(value.item(), learn(name, z, labels)[0].item(), rel_tol=1e-12)


@every
def test_float32_and_autocast_agree_with_float64(name):
    z, labels = batch(pairs=12)
    exact, _, direction = learn(name, z, labels)
    value, _, gradient = learn(name, z.float(), labels)
    assert value.dtype == torch.float32
    assert torch.isclose(value.double(), exact, rtol=1e-4)
    assert (gradient - direction).norm() < 1e-4 * direction.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert learn(name, z.float(), labels)[0] == value


@every
def test_length_matters_only_where_stated(name):
    z, labels = batch()
    lengths = torch.linspace(0.5, 1.5, 12, dtype=torch.float64)[:, None]
    value, other = learn(name, z, labels)[0], learn(name, lengths * z, labels)[0]
    assert torch.isclose(value, other, rtol=1e-9) != (name in LENGTH_COUNTS)


@every
def test_order_of_pairs_does_not_matter(name):
    z, labels = batch()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([2 * order, 2 * order + 1], 1).flatten()
    value, _, gradient = learn(name, z, labels)
    other, _, moved = learn(name, z[rows], labels[rows])
    assert torch.isclose(value, other, rtol=1e-12)
    assert torch.allclose(gradient[rows], moved, atol=1e-12)


@every
def test_names_of_people_do_not_matter(name):
    z, labels = batch()
    value = learn(name, z, labels)[0]
    for names in (10**12 - 7 * labels, labels.to(torch.uint8)):
        assert learn(name, z, names)[0] == value


@every
def test_one_person_only(name):
    z, labels = batch()
    value, seen, gradient = learn(name, z, 0 * labels)
    assert seen["negatives"] == 0 and gradient.isfinite().all() and value.isfinite()
    if name in {"ntxent", "circle"} or name.startswith("triplet"):
        assert value == 0 and gradient.abs().max() == 0
    if name == "supcon":
        assert value >= math.log(11)
    if name == "npair":  # its penalty alone
        assert torch.isclose(value, 0.02 * 2 * (z * z).sum(1).mean())


@every
def test_all_people_different(name):
    z, labels = batch()
    if name in PAIRED:
        with pytest.raises(ValueError, match="rows 0 and 1 must show one person"):
            learn(name, z, torch.arange(12))
    else:
        value, seen, gradient = learn(name, z, torch.arange(12))
        assert value == 0 and gradient.abs().max() == 0 and seen["negatives"] == 0


@every
def test_one_pair(name):
    z, labels = batch(pairs=1)
    value, seen, gradient = learn(name, z, labels)
    assert seen["negatives"] == 0 and value.isfinite() and gradient.isfinite().all()
    if name not in PAIRED:
        assert value == 0 and gradient.abs().max() == 0


@every
def test_one_image(name):
    z, labels = batch(pairs=1)
    if name in PAIRED:
        with pytest.raises(ValueError, match="partners stand in rows 2i and 2i"):
            learn(name, z[:1], labels[:1])
    else:
        assert learn(name, z[:1], labels[:1])[0] == 0


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_duplicated_images(name, dtype):
    z, labels = batch(dtype=dtype)
    pairs_of_copies, one_image = z[::2].repeat_interleave(2, 0), z[:1].expand(12, 8)
    for copies in (pairs_of_copies, one_image):
        value, _, gradient = learn(name, copies, labels)
        assert value.isfinite() and gradient.isfinite().all()


@every
def test_opposite_and_equal_directions(name):
    z = torch.eye(8)[[0, 0, 0, 0, 1, 1]] * torch.tensor([1.0, -1, -1, 1, 1, -1])[:, None]
    value, _, gradient = learn(name, z, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert value.isfinite() and gradient.isfinite().all()


@every
def test_zero_embedding_is_counted_and_has_no_direction(name):
    z, labels = batch()
    z[3] = 0
    value, seen, gradient = learn(name, z, labels)
    assert seen["zeros"] == 1 and value.isfinite() and gradient.isfinite().all()
    if name not in LENGTH_COUNTS:
        assert gradient[3].abs().max() == 0


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_reaches_the_loss(name, bad):
    z, labels = batch()
    z[5, 2] = bad
    people = [labels, 0 * labels] + ([] if name in PAIRED else [torch.arange(12)])
    assert all(not learn(name, z, y)[0].isfinite() for y in people)


@every
@pytest.mark.parametrize("dtype, large, small",
                         [(torch.float16, 65504, 6e-8), (torch.bfloat16, 1e15, 1e-15)])
def test_extremes_of_half_precision(name, dtype, large, small):
    z, labels = batch(dtype=dtype)
    z[0], z[1], z[4] = large, z[0].sign() * small, -large
    value, _, gradient = learn(name, z, labels)
    assert value.dtype == torch.float32 and value.isfinite()
    assert not gradient.isnan().any()  # far from 1, a gradient may leave the range of float16


@every
def test_labels_out_of_range(name):
    z, labels = batch()
    loss = MAKE[name]()
    for wrong, words in [(labels - 1, "label -1 stands in row 0"),
                         (labels.double(), "whole numbers"),
                         (labels[:10], "12 embeddings need as many labels")]:
        with pytest.raises(ValueError, match=words):
            loss(z, wrong)


@pytest.mark.parametrize("name", ["supcon", "ntxent", "npair", "siglip", "triplet", "circle"])
def test_entry_tells_what_a_reader_wants_to_know(name):
    entry = LOSSES[name]
    assert entry.family == "contrastive" and not entry.has_centres()
    assert all([entry.equation, entry.positives, entry.negatives, entry.source])
    assert "\n" not in entry.equation and entry.settings()
    assert all(str(value).removesuffix(".0") in repr(entry.make(**entry.demo)) for value in entry.demo.values())


def test_images_of_a_person_are_no_negatives_anywhere():
    "Two pairs of one person: moving one onto the other never costs"
    z = torch.eye(4).double()[[0, 0, 1, 1, 2, 2]]
    split, joined = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 0, 0])
    for name in ("ntxent", "npair", "siglip"):
        together = z.clone()
        together[2:4] = z[:2]
        assert learn(name, together, split)[0] <= learn(name, z, split)[0] + 1e-12
        assert learn(name, z, joined)[1]["negatives"] == 0


def test_triplets_of_a_large_batch_stay_within_memory():
    "4,000 images of 8 people: 7 billion triplets, a few numbers for each of 16 million distances"
    z, labels = torch.randn(4000, 16), torch.arange(4000) % 8
    value, seen, gradient = learn("triplet batch-all", z, labels)
    assert 0.2 < value < 2 and 0.3 < seen["active"] < 0.8 and gradient.norm() > 0


def test_diagnostics_on_a_large_batch():
    "8,192 random images: cosines are nearly normal with variance 1/d, which gives the mean"
    z = torch.randn(8192, 256, generator=torch.Generator().manual_seed(0))
    expected = -4 + 4**2 / 2 / 256
    assert abs(uniformity(z) - expected) < 1e-3
    assert abs(alignment(z, torch.arange(4096).repeat(2)) - 2) < 0.02


def test_diagnostics_say_nan_when_there_is_nothing_to_say():
    z = torch.randn(5, 3)
    assert alignment(z, torch.arange(5)).isnan() and uniformity(z[:1]).isnan()
    assert not alignment(z.requires_grad_(), torch.zeros(5)).requires_grad
