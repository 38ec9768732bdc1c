"""The NearID loss and its ablations: published values, invariances, holes, and several processes."""
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from facenb.interface import LOSSES
from facenb.nearid_ablations import (
    CircleTuples, ClipOne, SigLIPTuples, arcface_ext, arcface_ext_v3, circle_base, hinge_tier, image_reward, margin_triplet,
    one_positive, oracle_rank, oracle_regression, own_arcface, siglip_parts, soft_triplet, symmetric, triplet, triplet_ext)
from facenb.nearid_losses import SLOTS, TUPLE_LOSSES, NearID, cohesion, nearid_loss, nearid_parts, read_tuples
from facenb.registry import build_loss
from ranks import run_ranks

POS = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]) > 0
NEG = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]]) > 0
MARGIN = 0.1 + 0.1 * torch.arange(3, dtype=torch.float64) + 0.05 * torch.arange(4, dtype=torch.float64)[:, None]
VARIANTS = {name: {} for name in TUPLE_LOSSES} | {
    "nearid cohesion": {"beta": 0.3}, "nearid alpha 0": {"alpha": 0.0}, "clip_one all": {"include_negatives": True, "oracle_weight": 0.5},
    "clip_one first": {"select": "first"}, "circle_ext paper": {"tier": "paper"}}


def published() -> list[torch.Tensor]:
    "Anchor, positive, negative of the published values"
    count = lambda n: torch.arange(1, n + 1, dtype=torch.float64)
    base, p, k = 0.9 * torch.outer(count(4), count(8)), count(2)[:, None], count(3)[:, None]
    return [base.cos(), (base[:, None] + 0.3 * p).cos(), (base[:, None] + 0.8 + 0.25 * k).cos()]


WHOLE, HOLES = read_tuples(*published()), read_tuples(*published(), POS, NEG)
REPO = read_tuples(*published(), POS, NEG, pool="repo")
FIRST = torch.zeros(4, dtype=torch.long)
VALUES = {  # found, published
    "nearid": (nearid_loss(*published()), 3.9927835052), "nearid M": (nearid_loss(*published(), POS, NEG), 2.6555997015),
    "disc": (nearid_parts(WHOLE).discrimination, 1.3770872460), "rank": (nearid_parts(WHOLE).ranking, 5.2313925184),
    "disc M": (nearid_parts(HOLES).discrimination, 1.3103421457), "rank M": (nearid_parts(HOLES).ranking, 2.6905151118),
    "repo": (nearid_loss(*published(), pool="repo"), 3.9927835052), "repo M": (nearid_loss(*published(), POS, NEG, pool="repo"), 2.7492977772),
    "repo disc M": (nearid_parts(REPO, pool="repo").discrimination, 1.3521084167),
    "repo rank M": (nearid_parts(REPO, pool="repo").ranking, 2.7943787212),
    "temperature M": (nearid_loss(*published(), POS, NEG, temperature=0.1), 2.1256512252),
    "alpha 0 M": (nearid_loss(*published(), POS, NEG, alpha=0.0), 1.3103421457), "alpha 0.1 M": (nearid_loss(*published(), POS, NEG, alpha=0.1), 1.5793936568),
    "alpha 0.25 M": (nearid_loss(*published(), POS, NEG, alpha=0.25), 1.9829709236), "alpha 1 M": (nearid_loss(*published(), POS, NEG, alpha=1.0), 4.0008572574),
    "alpha 2 M": (nearid_loss(*published(), POS, NEG, alpha=2.0), 6.6913723692),
    "cohesion": (cohesion(WHOLE), 0.0116652995), "cohesion repo": (cohesion(WHOLE, "repo"), 0.0116652995),
    "cohesion M": (cohesion(HOLES), 0.0115355696), "cohesion repo M": (cohesion(HOLES, "repo"), 0.0076903798),
    "pairwise": (cohesion(WHOLE, mode="pairwise"), 0.0463825748), "pairwise M": (cohesion(HOLES, mode="pairwise"), 0.0458633859),
    "clip_one M": (one_positive(HOLES, FIRST, 0.07), 0.2864853923), "clip_one + R": (one_positive(WHOLE, FIRST, 0.07, True), 0.3036710502),
    "clip_one + R M": (one_positive(HOLES, FIRST, 0.07, True), 0.3017737708),
    "oracle": (oracle_rank(WHOLE, MARGIN), 0.5674324396), "oracle M": (oracle_rank(HOLES, MARGIN), 0.5622492179),
    "oracle_neg": (oracle_regression(WHOLE, MARGIN)[0], 0.2601538698), "oracle_pos": (oracle_regression(WHOLE, MARGIN)[1], 0.0172470852),
    "siglip main": (siglip_parts(WHOLE)[0], 0.3532187641), "siglip hard": (siglip_parts(WHOLE)[1], 0.0219835674),
    "siglip tier": (siglip_parts(WHOLE)[2], 5.2313925184), "siglip main M": (siglip_parts(HOLES)[0], 0.3915895224),
    "siglip hard M": (siglip_parts(HOLES)[1], 0.0324726153), "siglip tier M": (siglip_parts(HOLES)[2], 2.6905151118),
    "siglip": (SigLIPTuples().compare(*published(), POS | True, NEG | True, MARGIN)[0], 2.9908985906),
    "siglip M": (SigLIPTuples().compare(*published(), POS, NEG, MARGIN)[0], 1.7693196936),
    "circle tier": (hinge_tier(WHOLE) / 2, 29.3059995315 - 29.2233486176), "circle tier paper": (hinge_tier(WHOLE, tier="paper"), 0.5114892706),
    "circle tier M": (hinge_tier(HOLES) / 2, 28.1902929049 - 28.1622982025),
    "triplet": (triplet(WHOLE), 0.0872107373), "triplet M": (triplet(HOLES), 0.1079547697),
    "triplet_ext": (triplet_ext(WHOLE), 0.2911636810), "triplet_ext M": (triplet_ext(HOLES), 0.2166015634),
    "triplet_ext_v3": (soft_triplet(WHOLE), 10.1242354404), "triplet_ext_v3 M": (soft_triplet(HOLES), 6.3454248489),
    "margin_triplet": (margin_triplet(WHOLE), 0.1199815643), "margin_triplet M": (margin_triplet(HOLES), 0.0692522960),
    "irm": (image_reward(WHOLE), 0.4263804107), "irm M": (image_reward(HOLES), 0.4279685432)}
SINGLE = {  # published numbers that were computed in float32: they are float32 numbers, to their last digit
    "circle": (circle_base(WHOLE), 29.2233486176), "circle M": (circle_base(REPO, pool="repo"), 28.1622982025),
    "arcface": (own_arcface(WHOLE), 16.1555080414), "arcface M": (own_arcface(HOLES), 10.6842756271),
    "arcface_ext": (arcface_ext(WHOLE), 27.1730499268), "arcface_ext M": (arcface_ext(HOLES), 16.5800247192),
    "arcface_ext_v3": (arcface_ext_v3(WHOLE), 27.1730728149), "arcface_ext_v3 M": (arcface_ext_v3(HOLES), 16.5800457001)}


@pytest.mark.parametrize("name", VALUES)
def test_published_values(name):
    found, wanted = VALUES[name]
    assert abs(float(found) - wanted) < 1e-8


@pytest.mark.parametrize("name", SINGLE)
def test_published_values_of_float32(name):
    found, wanted = SINGLE[name]
    assert abs(float(np.float32(wanted)) - wanted) < 1e-10
    assert abs(float(found) - wanted) < 4 * np.spacing(np.float32(wanted))


def test_published_elements_and_gradients():
    parts = nearid_parts(HOLES)
    disc, rank = [0.102394, 2.333407, 0.001721, 0.668874, 2.182761, 0.677413], [0.002475, 0.089603, 1.453230, 0.006483, 0.112081, 5.227019, 11.942714]
    assert np.allclose(parts.disc[parts.disc_counts], disc, atol=1e-6, rtol=0) and np.allclose(parts.rank[parts.rank_counts], rank, atol=1e-6, rtol=0)
    batch = [x.requires_grad_() for x in published()]
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(nearid_loss(*batch), batch)]
    assert np.allclose(norms, [2.6079795586, 1.0441956729, 0.7831344251], atol=1e-8, rtol=0)


def test_alternative_means_have_other_values():
    "Published beside the chosen ones: a mean of slot means is no flat mean"
    parts = nearid_parts(HOLES)
    ranks = [parts.rank[:, k][parts.rank_counts[:, k]].mean() for k in range(3)]
    assert abs(parts.disc[parts.disc_counts].mean() - 0.9944282368) < 1e-8 and abs(sum(ranks) / 3 - 2.8480466467) < 1e-8


def test_golden_file(golden):
    stored = np.load(golden / "losses_visible.npz")
    batch = [torch.from_numpy(stored[f"nid_{key}"]).requires_grad_() for key in "apn"]
    for alpha in (0.0, 0.5, 1.0):
        loss = nearid_loss(*batch, alpha=alpha)
        assert abs(loss.item() - stored[f"nearid_full_a{alpha}_loss"]) < 1e-8
        for gradient, key in zip(torch.autograd.grad(loss, batch), "apn"):
            assert np.abs(gradient.numpy() - stored[f"nearid_full_a{alpha}_g{key}"]).max() < 1e-8
    t = read_tuples(*batch)
    assert abs(nearid_loss(*batch, alpha=0.0).item() - stored["nid_infonce_distr_in_denominator_loss"]) < 1e-8
    assert abs(nearid_loss(*batch[:2]).item() - stored["nid_infonce_ignore_loss"]) < 1e-8
    assert abs(symmetric(t).item() - stored["nid_symmetric_loss"]) < 1e-8
    assert abs(circle_base(t).item() - stored["nid_circle_loss"]) < 4 * np.spacing(np.float32(stored["nid_circle_loss"]))


def batch(rows: int = 6, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    "All six slots of each row, some not valid, and their labels"
    draw = torch.Generator().manual_seed(seed)
    valid = torch.rand(rows, SLOTS, generator=draw) < 0.6
    valid[:, 0] = True
    place, slot = torch.ones_like(valid).nonzero().T
    margin = torch.rand(len(slot), generator=draw, dtype=torch.float64) * (slot > 2)
    labels = torch.stack([place, slot, valid.flatten(), margin], 1).double()
    return torch.randn(len(slot), 12, generator=draw, dtype=torch.float64).to(dtype), labels


def loss_of(name: str):
    torch.manual_seed(0)
    return build_loss(name.split()[0], 2, 12, **VARIANTS[name])


def by_hand(t, name: str, tau=0.07) -> float:
    "Each ablation in loops over what exists"
    B, P, K = len(t.anchor), t.positive.shape[1], t.negative.shape[1]
    s = lambda i, v: float(t.anchor[i] @ v)
    pool = [(j, p) for j in range(B) for p in range(P) if t.pos_mask[j, p]]
    own = [[s(i, t.negative[i, k]) for k in range(K) if t.neg_mask[i, k]] for i in range(B)]
    soft, mean = lambda x: math.log1p(math.exp(x)), lambda values: sum(values) / max(len(values), 1)
    others = [[s(i, t.positive[v]) for v in pool if v[0] != i] for i in range(B)]
    mine = [[s(i, t.positive[v]) for v in pool if v[0] == i] for i in range(B)]
    rank = mean([math.log(1 + sum(math.exp((b - r) / tau) for b in others[i])) - 0.0 for i in range(B) if others[i]
                 for r in own[i]])
    if name == "nearid":
        return rank
    if name == "siglip_ext":
        main = mean([soft(-x / tau + 10) for i in range(B) for x in mine[i]] + [soft(x / tau - 10) for i in range(B) for x in others[i]])
        return main + mean([soft(r / tau - 10) for row in own for r in row]) + rank / 2
    m, scale, base = 0.25, 64, []
    for i in range(B):
        if mine[i] and others[i] + own[i]:
            pull = sum(math.exp(-scale * max(1 + m - x, 0) * (x - (1 - m))) for x in mine[i])
            base.append(math.log1p(pull * sum(math.exp(scale * max(x + m, 0) * (x - m)) for x in others[i] + own[i])))
    if name == "circle_ext paper":
        tier = mean([max(max(others[i]) - r + m, 0) for i in range(B) if others[i] for r in own[i]])
    else:
        tier = mean([sum(max(b - r + m, 0) for b in others[i]) / (B * P) for i in range(B) for r in own[i]])
    return mean(base) + tier / 2


@pytest.mark.parametrize("name", ["nearid", "siglip_ext", "circle_ext", "circle_ext paper"])
@pytest.mark.parametrize("seed", range(4))
def test_loops_agree(name, seed):
    images, labels = batch(seed=seed)
    block, valid = images.view(-1, SLOTS, 12), labels[:, 2].view(-1, SLOTS) > 0
    t = read_tuples(block[:, 0], block[:, 1:3], block[:, 3:], valid[:, 1:3], valid[:, 3:])
    found = nearid_parts(t).ranking if name == "nearid" else loss_of(name)(images, labels)[0]
    assert abs(float(found) - by_hand(t, name)) < 1e-9


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e4, 0.0])
@pytest.mark.parametrize("name", VARIANTS)
def test_padded_slots_have_no_say(name, rubbish):
    "Neither in the loss nor in what was seen, be they there or not"
    images, labels = batch()
    empty = labels[:, 2] == 0
    told = labels.clone()
    told[empty, 3] = rubbish
    clean, clean_seen = loss_of(name)(images[~empty], labels[~empty])
    dirty = images.masked_fill(empty[:, None], rubbish).requires_grad_()
    loss, seen = loss_of(name)(dirty, told)
    loss.backward()
    assert empty.sum() > 8 and loss == clean and dirty.grad.isfinite().all() and not dirty.grad[empty].any() and dirty.grad.any()
    assert seen.keys() == clean_seen.keys() and all(torch.equal(seen[key], clean_seen[key]) for key in seen)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"clip_one", "clip_one all", "clip_one first"}))
def test_order_does_not_matter(name):
    images, labels = batch()
    loss = loss_of(name)(images, labels)[0]
    draw = torch.Generator().manual_seed(4)
    mixed, moved = torch.randperm(len(images), generator=draw), labels.clone()
    moved[:, 0] = torch.randperm(6, generator=draw)[labels[:, 0].long()].double()  # rows
    moved[:, 1] = torch.tensor([0, 2, 1, 5, 3, 4])[labels[:, 1].long()].double()  # slots, with their masks and margins
    assert abs(loss_of(name)(images[mixed], moved[mixed])[0] - loss) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_is_raised(name, dtype):
    "Also where autocast would lower it again"
    images, labels = batch(dtype=dtype)
    images.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, seen = loss_of(name)(images, labels)
    full = loss_of(name)(images.detach().float(), labels)[0]
    loss.backward()
    assert loss.dtype == torch.float32 and loss == full and images.grad.isfinite().all()


def test_the_function_is_outside_autocast_too():
    half = [x.bfloat16() for x in published()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nearid_loss(*half, POS, NEG)
    assert loss.dtype == torch.float32 and loss == nearid_loss(*(x.float() for x in half), POS, NEG)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kept", ["no positive", "no distractor", "anchors only", "one identity", "one image"])
def test_what_is_missing_costs_nothing(name, kept):
    "A finite loss, a gradient path, and the same numbers as of any other batch"
    images, labels = batch()
    labels[:, 2] = 1
    place, slot = labels[:, 0], labels[:, 1]
    rows = {"no positive": (slot == 0) | (slot > 2), "no distractor": slot < 3, "anchors only": slot == 0, "one identity": place == 0,
            "one image": (place == 0) & (slot == 0)}[kept]
    loss = loss_of(name)
    usual = loss(images, labels)[1]
    part = images[rows].requires_grad_()
    value, seen = loss(part, labels[rows])
    value.backward()
    assert value.isfinite() and part.grad.isfinite().all() and seen.keys() == usual.keys() and all(x.isfinite() for x in seen.values())
    if kept in ("anchors only", "one image"):
        assert value == 0 and not part.grad.any()


def test_edge_cases_of_the_loss():
    anchor, positive, negative = published()
    none = nearid_loss(anchor.requires_grad_(), positive, negative, POS & False, NEG)
    assert none == 0 and not torch.autograd.grad(none, anchor)[0].any()
    pos = POS & torch.tensor([0, 1, 1, 1]).bool()[:, None]  # row 0 has no positive
    parts = nearid_parts(read_tuples(anchor, positive, negative, pos, NEG))
    assert parts.rank_counts[0].all() and not parts.disc_counts[0].any()
    alone = nearid_loss(anchor, positive, negative, POS & torch.tensor([1, 0, 0, 0]).bool()[:, None], NEG)  # row 0 has nobody to rank
    ranked = nearid_parts(read_tuples(anchor, positive, negative, POS & torch.tensor([1, 0, 0, 0]).bool()[:, None], NEG))
    assert alone.isfinite() and ranked.rank_counts.sum(1).tolist() == [0, 2, 2, 0]
    one = nearid_parts(read_tuples(anchor[:1], positive[:1], negative[:1]))
    assert one.ranking == 0 and not one.rank_counts.any() and one.discrimination > 0
    repo = nearid_parts(read_tuples(anchor[:1], positive[:1], negative[:1], pool="repo"), pool="repo")
    assert repo.ranking == 0 and repo.rank_counts.all()
    without = nearid_loss(anchor, positive)
    assert without == nearid_loss(anchor, positive, negative[:, :0]) == nearid_loss(anchor, positive, negative, neg_mask=NEG & False)
    assert without == nearid_loss(anchor[:, None], positive, alpha=0.0) != nearid_loss(anchor, positive, negative, alpha=0.0)
    pair = nearid_loss(*(torch.eye(2, 8, dtype=torch.float64).expand(n, 2, 8).transpose(0, 1) for n in (1, 2)), temperature=0.02)
    assert abs(pair - math.log(2)) < 1e-9  # two views of each that coincide


@pytest.mark.parametrize("alpha, low, high", [(0.5, 0.4, 0.7), (0.0, 0.05, 0.25)])
def test_order_of_free_embeddings(alpha, low, high):
    torch.manual_seed(1)
    centre = torch.randn(16, 1, 32)
    free = [(centre + 0.8 * torch.randn(16, n, 32)).requires_grad_() for n in (1, 2, 3)]
    adam = torch.optim.Adam(free, lr=0.05)
    for _ in range(300):
        adam.zero_grad()
        nearid_loss(*free, alpha=alpha).backward()
        adam.step()
    t = read_tuples(*(x.detach() for x in free))
    same, distractor = ((t.anchor[:, None] * views).sum(2).mean() for views in (t.positive, t.negative))
    other = (t.anchor @ t.positive.flatten(0, 1).T)[~torch.eye(16).bool().repeat_interleave(2, 1)].mean()
    assert same > distractor > other and low < distractor < high and same > 0.8 and other.abs() < 0.15
    assert nearid_parts(t).discrimination >= math.log(2) - 1e-3


def test_what_is_logged():
    "One row of unit vectors in the plane of two others, all numbers known"
    angle = lambda *degrees: torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=torch.float64)
    images = torch.cat([angle(0, 20, 40, 30, 80), angle(60, 60)])  # row 1 has one positive
    labels = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0], [0, 2, 1, 0], [0, 3, 1, 0.1], [0, 4, 1, 0.1], [1, 0, 1, 0], [1, 1, 1, 0]], dtype=torch.float64)
    loss, seen = NearID(temperature=0.5)(images, labels)
    cos = lambda d: math.cos(math.radians(d))
    assert seen["hits_1"] == 1 and seen["hits_2"] == 0  # 20 degrees is nearest to the anchor of row 0, 0 to that of row 1
    assert seen["valid_positives"] == 3 and seen["valid_distractors"] == 2 and seen["negatives"] == 1.5
    assert abs(seen["positive_cosine"] - (cos(20) + cos(40) + 1) / 3) < 1e-12
    assert abs(seen["distractor_cosine"] - (cos(30) + cos(80)) / 2) < 1e-12
    assert abs(seen["gap_to_hardest"] - (cos(20) + cos(40) - 2 * cos(30) + 1 - cos(20)) / 3) < 1e-12
    assert seen["above_batch"] == 0.5 and seen["above_best"] == 0.5  # of 30 and 80 degrees, one is nearer than 60
    weights = [np.exp(2 * np.array([cos(d) for d in row])) for row in ((20, 40, 60, 30, 80), (40, 20, 0))]
    entropies = [-(w / w.sum() * np.log(w / w.sum())).sum() for w in weights]
    assert abs(seen["entropy"] - np.mean(entropies)) < 1e-9 and abs(loss - seen["discrimination"] - 0.5 * seen["ranking"]) < 1e-12


def test_random_positive_is_drawn_from_what_is_valid_and_goes_on():
    loss, mask = ClipOne(), torch.tensor([[1, 1], [1, 0], [0, 1]]).bool()
    picks = torch.stack([loss.choose(mask) for _ in range(400)])
    assert (picks[:, 1] == 0).all() and (picks[:, 2] == 1).all() and 160 < picks[:, 0].sum() < 240
    again = ClipOne()
    again.load_state_dict({"batches": torch.tensor(123)})
    assert torch.equal(torch.stack([again.choose(mask) for _ in range(50)]), picks[123:173])
    before = torch.get_rng_state()
    loss.eval().choose(mask)
    assert loss.batches == 400 and torch.equal(torch.get_rng_state(), before)  # evaluation moves nothing


@pytest.mark.parametrize("make, words", [
    (lambda: NearID(temperature=0.0), "temperature=0.0"), (lambda: NearID(alpha=-0.5), "alpha=-0.5"), (lambda: NearID(beta=math.nan), "beta=nan"),
    (lambda: NearID(pool="all"), "pool='all'"), (lambda: ClipOne(oracle_weight=-1.0), "oracle_weight=-1.0"), (lambda: ClipOne(select="last"), "select='last'"),
    (lambda: SigLIPTuples(tier_weight=-1.0), "tier_weight=-1.0"), (lambda: CircleTuples(tier="mean"), "tier='mean'"), (lambda: CircleTuples(scale=0.0), "scale=0.0"),
    (lambda: nearid_loss(*published(), pos_mask=POS.int()), "pos_mask"), (lambda: nearid_loss(*published(), POS, NEG[:, :2]), "neg_mask"),
    (lambda: nearid_loss(published()[0].long(), *published()[1:]), "anchor must be real numbers"),
    (lambda: nearid_loss(published()[0], published()[1][:, :, :5]), "positive is (4, 2, 5)")])
def test_errors_name_the_parameter(make, words):
    with pytest.raises(ValueError) as raised:
        make()
    assert words in str(raised.value)


@pytest.mark.parametrize("column, value, words", [
    (0, 0.5, "row 5 of labels"), (0, -1, "row 5 of labels"), (1, 6, "slots in 0..5"), (1, math.nan, "whole numbers"), (2, 0.5, "valid is 0 or 1"),
    (2, math.nan, "valid is 0 or 1"), (3, math.nan, "margin"), (1, 0, "share a place and a slot")])
def test_labels_that_cannot_be(column, value, words):
    images, labels = batch()
    labels[5, 2] = 1
    labels[5, column] = value
    with pytest.raises(ValueError) as raised:
        NearID()(images, labels)
    assert words in str(raised.value)


def test_registry_says_what_its_losses_are():
    assert set(TUPLE_LOSSES) == {"nearid", "clip_one", "siglip_ext", "circle_ext"} and not TUPLE_LOSSES.keys() & LOSSES.keys()
    assert TUPLE_LOSSES["nearid"].settings() == {"temperature": 0.07, "alpha": 0.5, "beta": 0.0, "pool": "masked"}
    everything = [*LOSSES.values(), *TUPLE_LOSSES.values()]
    for name, entry in TUPLE_LOSSES.items():
        assert entry.family == "tuple" and entry.equation and entry.positives and entry.negatives and entry.source
        told = repr(entry.make())
        for key, value in entry.settings().items():
            assert f"{key}={value}" in told and {type(e.settings()[key]) for e in everything if key in e.settings()} == {type(value)}


RANKS = {2: [([3, 3], [3, 3]), ([1, 3], [4, 4])], 3: [([1, 2, 1], [3, 3, 2])]}  # rows, and those of a full batch


def learn(name: str, shares: list[int], full: list[int], rank: int = 0, group=None) -> dict:
    "Loss and gradients of images and of a weight, with NaN in what is not valid; the weight's are averaged over ranks"
    images, labels = batch(sum(shares), seed=sum(shares))
    last = labels[:, 0] == sum(shares) - 1
    labels[last & (labels[:, 1] > 0), 2] = 0  # a row, or a whole rank, of which nothing but the anchor is valid
    images = images.masked_fill(labels[:, 2:3] == 0, math.nan)
    first = sum(shares[:rank])
    mine = (labels[:, 0] >= first) & (labels[:, 0] < first + shares[rank]) if group else torch.ones(len(labels)).bool()
    weight = (torch.eye(12) + 0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(1))).double().requires_grad_()
    there = labels[mine][:, 2:3] > 0
    z = torch.where(there, torch.where(there, images[mine], 0) @ weight, math.nan)
    z.retain_grad()
    own = labels[mine] - torch.tensor([first if group else 0, 0, 0, 0])
    loss = loss_of(name).gather_over(group, [SLOTS * rows for rows in full] if group else None)
    loss(z.detach(), own)  # clip_one then draws anew
    value, seen = loss(z, own)
    value.backward()
    of_weight, own_gradient = weight.grad, z.grad / len(shares) if group else z.grad
    if group is not None:
        dist.all_reduce(of_weight, group=group)
        of_weight /= len(shares)
    return {"value": value.detach(), "weight": of_weight, "images": own_gradient, "first": first, "seen": seen}


def on_a_rank(rank: int, group) -> list[dict]:
    return [{name: learn(name, *case, rank, group) for name in VARIANTS} for case in RANKS[dist.get_world_size(group)]]


@pytest.mark.parametrize("world", RANKS)
def test_ranks_are_one_process(world):
    "Unequal rows, unequal valid slots, batches that are not full"
    found = run_ranks(on_a_rank, world)
    for case, (shares, full) in enumerate(RANKS[world]):
        for name in VARIANTS:
            alone = learn(name, shares, full)
            together = [found[rank][case][name] for rank in range(world)]
            assert alone["weight"].abs().max() > 1e-6
            for run in together:
                assert abs(run["value"] - alone["value"]) < 1e-12 and (run["weight"] - alone["weight"]).abs().max() < 1e-12 * max(1, alone["weight"].abs().max())
                assert all(abs(run["seen"][key] - alone["seen"][key]) < 1e-12 for key in alone["seen"].keys() - {"zeros"}), name
            images = torch.cat([run["images"] for run in together])
            assert (images - alone["images"]).abs().max() < 1e-12 * max(1, alone["images"].abs().max()), name


def refuses(rank: int, group) -> list[str]:
    words = []
    for counts in (None, [6], [6, 7]):
        try:
            NearID().gather_over(group, counts)
        except ValueError as error:
            words.append(str(error))
    return words


def test_ranks_say_how_much_they_exchange():
    for words in run_ranks(refuses, 2):
        assert len(words) == 3 and all("must be 2 multiples of 6" in text for text in words)
