"""Gradient caching where it meets real networks, failures, accelerate and several processes."""
import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from facenb.backbones import SmallFaceNet
from facenb.cache import CacheError, cached_backward, even_chunks
from facenb.gather import gather_rows
from facenb.interface import full_precision, unit_norm


@pytest.fixture(autouse=True)
def one_thread():
    "Networks this small only get slower by more"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def info_nce(z, temperature=0.2):
    z = unit_norm(z)
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z)) ^ 1), {"rows": torch.tensor(len(z))}


class Block(nn.Module):
    "The block of IResNet: batch normalisation first and last, PReLU between (Deng et al. 2019)"

    def __init__(self, inputs, outputs):
        super().__init__()
        self.main = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
            nn.PReLU(outputs), nn.Conv2d(outputs, outputs, 3, 2, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return self.main(x) + self.shortcut(x)


def iresnet(dropout=0.4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.PReLU(6), Block(6, 8),
                         Block(8, 12), nn.BatchNorm2d(12), nn.Flatten(), nn.Dropout(dropout),
                         nn.Linear(12 * 9, 8), nn.BatchNorm1d(8))


def small_net(dropout=0.4):
    torch.manual_seed(0)
    net = SmallFaceNet(16, 8)
    net.embedding.insert(1, nn.Dropout(dropout))
    return net


def one_graph(net, chunks, loss_of, embed=None, backward=torch.Tensor.backward):
    loss, seen = loss_of(torch.cat([full_precision((embed or net)(chunk)) for chunk in chunks]))
    backward(loss)
    return loss.detach(), seen


def outcome(step, net, chunks, **options):
    net = copy.deepcopy(net)
    torch.manual_seed(1)
    loss, seen = step(net, chunks, info_nce, **options)
    return [loss, seen["rows"], *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make, size", [(iresnet, 12), (small_net, 16)])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [5, 5, 5, 3], [2, 7, 3], [12], [2] * 9])
def test_equals_one_graph_bitwise(make, size, sizes, dtype):
    net = make().to(dtype)
    chunks = torch.randn(sum(sizes), 3, size, size, dtype=dtype).split(sizes)
    wanted = outcome(one_graph, net, chunks)
    for keep in range(len(sizes) + 1):
        assert same(outcome(cached_backward, net, chunks, keep=keep), wanted), keep


def test_two_steps_of_training():
    results = []
    for step, options in [(one_graph, {}), (cached_backward, {"keep": 0}), (cached_backward, {"keep": 2})]:
        net = iresnet()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(2)
        for _ in range(3):
            optimizer.zero_grad()
            step(net, even_chunks(torch.randn(14, 3, 12, 12), 4), info_nce, **options)
            optimizer.step()
        results.append([*net.state_dict().values(), torch.get_rng_state()])
    assert same(results[1], results[0]) and same(results[2], results[0])


@pytest.mark.parametrize("keep, failing", [(0, 4), (0, 5), (0, 7), (1, 4), (1, 6), (3, 4)])  # of 4 + (4 - keep) calls
def test_failure_leaves_no_trace(keep, failing):
    "Whatever fails in the second pass: statistics, counters and random state are those after the first"
    net, chunks = iresnet(), torch.randn(16, 3, 12, 12).split(4)
    untouched, calls, generator = copy.deepcopy(net), [], torch.Generator().manual_seed(4)
    torch.manual_seed(1)
    settings = [(m.momentum, m.training) for m in net.modules() if isinstance(m, nn.BatchNorm2d)]

    def embed(chunk, net=net):
        calls.append(chunk)
        z = net(chunk + torch.rand(1, generator=generator))
        if len(calls) == failing + 1:
            raise MemoryError("as when memory runs out")
        return z

    with pytest.raises(MemoryError):
        cached_backward(net, chunks, info_nce, keep=keep, embed=embed, generators=[generator])
    state = torch.get_rng_state(), generator.get_state()
    assert settings == [(m.momentum, m.training) for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.manual_seed(1), generator.manual_seed(4)
    with torch.no_grad():
        [untouched(chunk + torch.rand(1, generator=generator)) for chunk in chunks]
    assert same(list(net.buffers()), list(untouched.buffers()))
    assert same(state, (torch.get_rng_state(), generator.get_state()))


def test_numbers_that_cannot_be_replayed_are_found():
    net, chunks = iresnet(), torch.randn(12, 3, 12, 12).split(4)
    noise = torch.Generator().manual_seed(0)
    embed = lambda x: net(x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1, generator=noise).round()) + torch.rand(1, generator=noise))
    with pytest.raises(CacheError, match="chunk 0 gave other embeddings"):
        cached_backward(net, chunks, info_nce, embed=embed)
    cached_backward(net, chunks, info_nce, embed=embed, generators=[noise])


def test_a_loss_that_is_no_number_goes_through():
    "Half precision relies on it: the scaler sees the infinite gradient and skips the step"
    net, chunks = iresnet(), torch.randn(8, 3, 12, 12).split(4)
    chunks[1][0, 0, 0, 0] = math.nan
    loss, _ = cached_backward(net, chunks, info_nce)
    assert loss.isnan() and all(p.grad.isnan().any() for p in net.parameters())


def test_micro_batches_are_not_a_large_batch():
    "Negatives do not cross micro-batches: other loss, other gradient, whatever the scaling"
    net, chunks = small_net(dropout=0), torch.randn(32, 3, 16, 16).split(4)
    exact, wrong = copy.deepcopy(net), copy.deepcopy(net)
    loss, _ = cached_backward(exact, chunks, info_nce)
    parts = [info_nce(wrong(chunk))[0] / 8 for chunk in chunks]
    sum(parts).backward()
    exact, wrong = [torch.cat([p.grad.flatten() for p in net.parameters()]) for net in (exact, wrong)]
    assert sum(parts) < loss - 1  # log 3 instead of log 31 for a net that knows nothing
    assert F.cosine_similarity(exact, wrong, dim=0) < 0.9


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_with_accelerate(precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    chunks = torch.randn(14, 3, 12, 12).split(4)

    def run(step, **options):
        net = iresnet()
        wrapped, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        def embed(faces):
            with accelerator.autocast():
                return wrapped(faces)
        torch.manual_seed(1)
        loss, _ = step(wrapped, chunks, info_nce, embed=embed, backward=accelerator.backward, **options)
        return [loss, *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()]

    try:
        wanted = run(one_graph)
        for keep in range(5):
            assert same(run(cached_backward, keep=keep), wanted), keep
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def gap(got, wanted):
    "Relative difference of two lists of tensors, as one long vector"
    a, b = [torch.cat([t.flatten() for t in tensors]) for tensors in (got, wanted)]
    return ((a - b).norm() / b.norm()).item()


COUNTS = [14, 10]  # images of the ranks
FEWER, EQUAL = [[4, 4, 4, 2], [6, 4]], [[4, 4, 4, 2], [3, 3, 2, 2]]  # images in the chunks of the ranks
CASES = [(0, FEWER), (1, FEWER), (4, FEWER), (0, EQUAL), (3, EQUAL), (4, EQUAL)]  # keep, chunks


def faces_of_ranks():
    every = torch.randn(sum(COUNTS), 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return every.split(COUNTS)


def two_steps(net, step, *arguments, **options):
    "Loss and gradients of a second step, after plain gradient descent"
    for _ in range(2):
        net.zero_grad()
        loss, _ = step(*arguments, **options)
        with torch.no_grad():
            [p.sub_(0.1 * p.grad) for p in net.parameters()]
    return [loss, *(p.grad for p in net.parameters())]


def ddp_steps(rank, group):
    "For each case: loss and gradients, batches that the own statistics have seen, how often gradients were sent"
    results = []
    for keep, sizes in CASES:
        net, sent = iresnet(dropout=0).double(), []
        wrapped = DistributedDataParallel(net, process_group=group)

        def counted(state, bucket, sent=sent):
            sent.append(bucket.is_last())
            done = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True).get_future()
            return done.then(lambda done: done.value()[0])

        wrapped.register_comm_hook(None, counted)
        loss_of = lambda z: info_nce(gather_rows(z, group, COUNTS))
        chunks = faces_of_ranks()[rank].split(sizes[rank])
        results.append([two_steps(net, cached_backward, wrapped, chunks, loss_of, keep=keep),
                        net[1].num_batches_tracked, sum(sent)])
    return results


def test_data_parallel_equals_one_process():
    ranks = run_ranks(ddp_steps, 2)
    for number, (keep, sizes) in enumerate(CASES):
        net = iresnet(dropout=0).double()
        chunks = [chunk for faces, part in zip(faces_of_ranks(), sizes) for chunk in faces.split(part)]
        wanted = two_steps(net, one_graph, net, chunks, info_nce)
        for rank in (0, 1):
            got, tracked, sent = ranks[rank][number]
            assert gap(got, wanted) < 1e-12, (keep, sizes)
            assert sent == 2  # once a step
            assert tracked == 4 + len(sizes[rank])  # rank 0's of the first step, as DDP shares them, and own ones


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    backward = staticmethod(lambda ctx, gradient: SumOfRanks.forward(ctx, gradient))


class SyncedNorm(nn.Module):
    "Batch normalisation with the statistics of all ranks, on any device"

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        parts = torch.stack([x.new_full((x.shape[1],), x.numel() / x.shape[1]), x.sum(axes), x.square().sum(axes)])
        if dist.is_initialized():
            parts = SumOfRanks.apply(parts)
        number, total, squares = parts
        mean = total / number
        scale = self.weight / (squares / number - mean.square() + 1e-5).sqrt()
        return (x - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)


def synced(net):
    for name, child in net.named_children():
        plain = isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d))
        setattr(net, name, SyncedNorm(child.num_features) if plain else synced(child))
    return net


def test_synced_norm_is_batch_norm():
    x = torch.randn(5, 4, 3, 3, dtype=torch.float64)
    assert torch.allclose(SyncedNorm(4).double()(x), nn.BatchNorm2d(4).double()(x), atol=1e-12)


def synced_steps(rank, group):
    faces = faces_of_ranks()[0][:12].view(2, 3, 2, 3, 12, 12)[rank]
    loss_of, results = lambda z: info_nce(gather_rows(z, group)), []
    for keep in (0, 1, 3):
        net = synced(iresnet(dropout=0)).double()
        loss, _ = cached_backward(DistributedDataParallel(net, process_group=group), faces, loss_of, keep=keep)
        results.append([loss, *(p.grad for p in net.parameters())])
    with pytest.raises(ValueError, match="GPU"):
        nn.SyncBatchNorm(3, process_group=group)(faces[0, 0, None].float())
    return results


def test_synchronised_statistics_are_those_of_larger_chunks():
    "Chunk k of all ranks together is normalised as chunk k of one process; torch's own runs on GPUs only"
    faces = faces_of_ranks()[0][:12].view(2, 3, 2, 3, 12, 12).transpose(0, 1).flatten(1, 2)
    order = torch.tensor([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11])  # rank after rank
    net = iresnet(dropout=0).double()
    loss, _ = one_graph(net, faces, lambda z: info_nce(z[order]))
    wanted = [loss, *(p.grad for p in net.parameters())]
    for results in run_ranks(synced_steps, 2):
        for got in results:
            assert gap(got, wanted) < 1e-12
