"""Published weights from a hub that is played here: fetched once, whole or not at all, then never asked for again."""
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from facenb import published
from facenb.backbones import BACKBONES
from facenb.foundation import ActivationMismatch, ClipB32, DinoV2B14, SigLip2So400m
from facenb.command import main
from facenb.weights import WeightsError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8, "image_size": 32}
TINY = {ClipB32: SIZES | {"intermediate_size": 48, "projection_dim": 24}, DinoV2B14: SIZES,
        SigLip2So400m: SIZES | {"intermediate_size": 48}}


class Hub(ThreadingHTTPServer):
    "As much of the Hugging Face hub as its client asks for; `requests` counts, `stall` stops a file midway"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.requests, self.stall, self.damage, self.stalled = {}, [], None, None, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *arguments):  # a client that was killed
        pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = urlsplit(self.path).path.strip("/")
        self.server.requests.append(path)
        words = path.removeprefix("api/models/").split("/")
        files = self.server.repositories.get("/".join(words[:2]))
        if files is None:
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        if words[2:3] == ["resolve"]:
            return self.file(words[4], files.get(words[4]), body)
        facts = [{"rfilename": name, "path": name, "type": "file", "size": len(content), "oid": name, "blobId": name}
                 | ({"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "oid": hashlib.sha256(content).hexdigest(),
                             "size": len(content), "pointerSize": 1}} if len(content) > 1000 else {})
                 for name, content in files.items()]
        answer = facts if words[2:3] == ["tree"] else {"id": "/".join(words[:2]), "sha": COMMIT, "siblings": facts}
        self.answer(json.dumps(answer).encode(), 200, {"Content-Type": "application/json"}, body)

    def file(self, name, content, body):
        if content is None:
            return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        start = int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])
        if name == self.server.damage:
            content = bytes(len(content))
        self.answer(content[start:], 206 if start else 200, {
            "X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes",
            **({"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {})}, body, name)

    def answer(self, content, status, headers, body=True, name=None):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body and name and name == self.server.stall:
            self.wfile.write(content[:len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            time.sleep(60)
        elif body:
            self.wfile.write(content)


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.shutdown()


@pytest.fixture
def data(tmp_path, monkeypatch):
    "The data folder, for this process and for others"
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def saved(network, folder: Path) -> dict[str, bytes]:
    "A tiny network as its repository would hold it, beside what must not be taken"
    torch.manual_seed(0)
    net = network(24, config=TINY[network]).eval()
    net.vision.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "pytorch_model.bin": b"a pickle", "modeling.py": b"raise SystemExit", "README.md": b"hello"}


def command(data: Path, hub: Hub, *words: str) -> list:
    environment = os.environ | {"DATA_DIR": str(data), "HF_HOME": str(data.parent / "hf"), "HF_ENDPOINT": hub.url}
    code = "import sys; from facenb.command import main; sys.exit(main())"
    return [[sys.executable, "-c", code, "prepare", "weights", *words], {"env": environment, "text": True}]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def weights(monkeypatch, capfd):
    "`facenb prepare weights` in this process, which has loaded torch already; the hub may be None: nobody answers"
    def run(data: Path, hub: Hub | None, *words: str) -> Done:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv("DATA_DIR", str(data))
            patch.setenv("HF_ENDPOINT", hub.url if hub else "http://127.0.0.1:9")
            return Done(main(["prepare", "weights", *words]), *capfd.readouterr())
    return run


def said(done) -> str:
    "The one line about a mistake"
    assert done.returncode == 2 and done.stdout == "", done
    line = [line for line in done.stderr.splitlines() if line.startswith("facenb: ")]
    assert len(line) == 1 and "Traceback" not in done.stderr, done.stderr
    return line[0]


def test_fetched_once_then_never_asked_for(hub, data, tmp_path, weights):
    hub.repositories["openai/clip-vit-base-patch32"] = files = saved(ClipB32, tmp_path / "clip")
    done = weights(data, hub, "clip_vit_b32")
    assert done.returncode == 0 and COMMIT in done.stdout, done.stderr
    folder = published.find("clip_vit_b32", check=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "source.json"]
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    source = published.read_source(folder)
    assert (source["repository"], source["revision"]) == ("openai/clip-vit-base-patch32", COMMIT)
    assert not [path for path in hub.requests if path.endswith((".bin", ".py"))]
    asked = len(hub.requests)
    assert weights(data, hub, "clip_vit_b32", "--check").returncode == 0 and len(hub.requests) == asked
    net = ClipB32(24, weights=folder, config=TINY[ClipB32])
    assert net.origin == {"repository": "openai/clip-vit-base-patch32", "revision": COMMIT, "file": "model.safetensors",
                          "sha256": hashlib.sha256(files["model.safetensors"]).hexdigest()}
    assert "holds openai/clip" in said(weights(data, hub, "clip_vit_b32", "--revision", "other"))
    assert weights(data, hub, "clip_vit_b32", "--revision", COMMIT[:8]).returncode == 0


def test_killed_download_is_not_taken_for_complete(hub, data, tmp_path, weights):
    hub.repositories["facebook/dinov2-base"] = files = saved(DinoV2B14, tmp_path / "dino")
    hub.stall = "model.safetensors"
    arguments, options = command(data, hub, "dinov2_vit_b14")
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(FileNotFoundError, match="facenb prepare weights dinov2_vit_b14"):
        published.find("dinov2_vit_b14")
    hub.stall = None
    assert weights(data, hub, "dinov2_vit_b14").returncode == 0
    folder = published.find("dinov2_vit_b14", check=True)
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_two_processes_fetch_once(hub, data, tmp_path):
    hub.repositories["openai/clip-vit-base-patch32"] = saved(ClipB32, tmp_path / "clip")
    arguments, options = command(data, hub, "clip_vit_b32")
    both = [subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len([path for path in hub.requests if path.startswith("api/models") and "tree" not in path]) == 1
    published.find("clip_vit_b32", check=True)


def test_damaged_on_the_way(hub, data, tmp_path, weights):
    hub.repositories["openai/clip-vit-base-patch32"] = saved(ClipB32, tmp_path / "clip")
    hub.damage = "model.safetensors"
    assert "model.safetensors of openai/clip-vit-base-patch32 arrived damaged" in said(weights(data, hub, "clip_vit_b32"))
    with pytest.raises(FileNotFoundError):
        published.find("clip_vit_b32")
    hub.damage = None
    assert weights(data, hub, "clip_vit_b32").returncode == 0
    published.find("clip_vit_b32", check=True)


def test_mistakes_in_one_line(hub, data, tmp_path, weights):
    assert "could not be fetched from the hub" in said(weights(data, hub, "clip_vit_b32"))
    assert "--source FOLDER" in said(weights(data, None, "clip_vit_b32"))  # nobody answers at all
    hub.repositories["openai/clip-vit-base-patch32"] = {"README.md": b"", "flax_model.msgpack": b""}
    assert "holds neither model.safetensors nor pytorch_model.bin, but README.md" in said(weights(data, hub, "clip_vit_b32"))
    done = weights(data, hub, "clip")
    assert done.returncode == 2 and "clip_vit_b32     openai/clip-vit-base-patch32" in done.stderr
    assert "timm knows no published weights of 'vit_huger'" in said(weights(data, hub, "timm:vit_huger"))


def test_only_a_pickle(hub, data, tmp_path, weights):
    files = saved(ClipB32, tmp_path / "clip")
    tensors = load_file(tmp_path / "clip" / "model.safetensors")
    torch.save(tensors, tmp_path / "model.bin")
    hub.repositories["openai/clip-vit-base-patch32"] = {
        "config.json": files["config.json"], "pytorch_model.bin": (tmp_path / "model.bin").read_bytes()}
    assert weights(data, hub, "clip_vit_b32").returncode == 0
    folder = published.find("clip_vit_b32", check=True)
    assert not list(folder.glob("*.bin"))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(folder / "model.safetensors").items())


class Boom:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_with_code_is_refused(hub, data, tmp_path, monkeypatch, weights):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Boom()}, "model.bin")
    hub.repositories["openai/clip-vit-base-patch32"] = {"config.json": b"{}", "pytorch_model.bin": Path("model.bin").read_bytes()}
    assert "pytorch_model.bin" in said(weights(data, hub, "clip_vit_b32"))
    with pytest.raises(WeightsError, match="model.bin"):
        ClipB32(weights="model.bin")
    assert not Path("executed").exists()
    with pytest.raises(FileNotFoundError):
        published.find("clip_vit_b32")


def test_weights_of_timm(hub, data, tmp_path, weights):
    save_file({"fc.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    hub.repositories["timm/resnet18.a1_in1k"] = {"model.safetensors": (tmp_path / "model.safetensors").read_bytes(), "config.json": b"{}"}
    assert weights(data, hub, "timm:resnet18", "clip_vit_b32").returncode == 2  # the second is not there
    assert published.read_source(published.find("timm:resnet18"))["repository"] == "timm/resnet18.a1_in1k"


def sharded(network, folder: Path) -> Path:
    torch.manual_seed(0)
    network(24, config=TINY[network]).vision.save_pretrained(folder, max_shard_size="10KB")
    return folder


def test_shards(data, tmp_path):
    there = sharded(SigLip2So400m, tmp_path / "there")
    shards = sorted(path.name for path in there.glob("model-*.safetensors"))
    assert len(shards) > 2
    faces = torch.rand(2, 3, 24, 24)
    torch.manual_seed(0)
    expected = SigLip2So400m(24, config=TINY[SigLip2So400m])(faces)
    folder = published.fetch("siglip2_so400m", there)
    net = SigLip2So400m(24, weights=folder, config=TINY[SigLip2So400m])
    assert torch.allclose(net(faces), expected, atol=1e-6) and net.origin["file"].split() == shards
    (folder / shards[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shards[1]} is missing: `facenb prepare weights siglip2_so400m`"):
        published.find("siglip2_so400m")
    with pytest.raises(FileNotFoundError, match=f"lacks {shards[1]}"):
        SigLip2So400m(24, weights=folder, config=TINY[SigLip2So400m])
    published.fetch("siglip2_so400m", there)
    (folder / shards[0]).write_bytes((folder / shards[0]).read_bytes()[:-1])
    with pytest.raises(published.PublishedError, match=f"changed since it was fetched: {shards[0]}"):
        published.find("siglip2_so400m")


def test_a_copied_folder_keeps_its_origin(hub, data, tmp_path, monkeypatch, weights):
    hub.repositories["openai/clip-vit-base-patch32"] = saved(ClipB32, tmp_path / "clip")
    assert weights(data, hub, "clip_vit_b32").returncode == 0
    there = data / "weights"
    assert weights(tmp_path / "other", None, "clip_vit_b32", "--source", str(there)).returncode == 0  # a mirror of all weights
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "other"))
    source = published.read_source(published.find("clip_vit_b32", check=True))
    assert (source["repository"], source["revision"]) == ("openai/clip-vit-base-patch32", COMMIT)
    assert weights(tmp_path / "other", None, "clip_vit_b32").returncode == 0  # it is there
    (there / "clip_vit_b32" / "config.json").write_text("{}")
    assert "is not the file that" in said(weights(tmp_path / "other", None, "clip_vit_b32", "--source", str(there), "--force"))
    published.find("clip_vit_b32", check=True)


def test_without_network(data, tmp_path):
    "Sockets that cannot be opened, and no word to transformers that it is offline"
    for network in TINY:
        sharded(network, tmp_path / network.__name__)
    code = """
import socket, sys, time
def refuse(*arguments, **options): raise AssertionError("the network was asked")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
import torch
from facenb import foundation, published
for name, config in {configs}.items():
    net = getattr(foundation, name)(24, weights=f"{folder}/{{name}}", config=config)
    assert net(torch.zeros(1, 3, 24, 24)).isfinite().all()
start = time.perf_counter()
try:
    published.find("clip_vit_b32")
except FileNotFoundError as error:
    assert "source.json is missing: `facenb prepare weights clip_vit_b32`" in str(error), error
    assert time.perf_counter() - start < 5
    print("fine")
""".format(configs={network.__name__: config for network, config in TINY.items()}, folder=tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("said_act", ["gelu", "gelu_new", None])
def test_the_wrong_activation_stops(tmp_path, said_act):
    sharded(ClipB32, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": said_act}))
    with pytest.raises(ActivationMismatch, match=f"config.json: hidden_act {said_act!r}.*'quick_gelu'"):
        ClipB32(24, weights=tmp_path, config=TINY[ClipB32])


def test_a_bare_file_gets_the_activation_of_its_weights(tmp_path, monkeypatch, weights):
    saved(ClipB32, tmp_path)
    net = ClipB32(24, weights=tmp_path / "model.safetensors", config=TINY[ClipB32])
    kinds = {type(module).__name__ for name, module in net.named_modules() if name.endswith("activation_fn")}
    assert kinds == {"QuickGELUActivation"}
    from transformers import activations  # a library that builds something else than it was told is noticed
    monkeypatch.setitem(activations.ACT2FN, "quick_gelu", torch.nn.GELU)
    with pytest.raises(ActivationMismatch, match="activation_fn is GELU.*need quick_gelu"):
        ClipB32(24, weights=tmp_path / "model.safetensors", config=TINY[ClipB32])


@pytest.mark.parametrize("name", ["clip_vit_b32", "dinov2_vit_b14", "ijepa_vit_h14", "siglip2_so400m"])
def test_the_table_is_what_transformers_builds(name):
    "The real sizes on the meta device: tokens, embedding, and no buffer or weight left behind"
    entry = BACKBONES[name]
    with torch.device("meta"):
        net = entry.build(image_size=entry.image_size)
        faces = torch.zeros(2, 3, entry.image_size, entry.image_size)
    assert net(faces).shape == (2, entry.embedding_dim)
    assert net.tokens(faces).shape[1] == net.class_tokens + net.grid**2 == {
        "clip_vit_b32": 50, "dinov2_vit_b14": 257, "ijepa_vit_h14": 256, "siglip2_so400m": 729}[name]


def tiny_clip(folder, activation="quick_gelu"):
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, patch_size=8, image_size=32, projection_dim=24)
    CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, hidden_act=activation)).save_pretrained(folder)
    return {**sizes}


def test_the_activation_of_a_file_is_read_beside_it(tmp_path):
    "The published trap: a path to weights, whose configuration nobody looks at"
    sizes = tiny_clip(tmp_path, "gelu")
    with pytest.raises(ActivationMismatch, match="config.json: hidden_act 'gelu'"):
        ClipB32(32, weights=tmp_path / "model.safetensors", config=sizes)
    (tmp_path / "model.safetensors").rename(tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"quick_gelu": False}}))
    with pytest.raises(ActivationMismatch, match="quick_gelu False"):
        ClipB32(32, weights=tmp_path / "open_clip_model.safetensors", config=sizes)
    (tmp_path / "open_clip_config.json").unlink()
    with pytest.warns(UserWarning, match="does not say its activation"):
        ClipB32(32, weights=tmp_path / "open_clip_model.safetensors", config=sizes)


def test_whole_numbers_are_no_weights(tmp_path):
    from safetensors.torch import load_file, save_file
    sizes = tiny_clip(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: (value * 20).to(torch.int8) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="whole numbers"):
        ClipB32(32, weights=tmp_path, config=sizes)


@pytest.mark.parametrize("content, says", [({"do_normalize": False}, "do_normalize"), ({"rescale_factor": 1 / 127.5}, "rescale_factor"),
                                           ({"image_mean": 0.5}, "image_mean"), ({"size": "big"}, "size 'big'")])
def test_preprocessing_that_is_not_done_is_refused(tmp_path, content, says):
    sizes = tiny_clip(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=says):
        ClipB32(32, weights=tmp_path, config=sizes)


def test_the_real_clip_goes_all_the_way(tmp_path, monkeypatch):
    "Random weights of the published configuration: fetched, found, adapted, stored, loaded, merged"
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
    from facenb.cards import save_trained
    from facenb.load import load_backbone
    from facenb.lora import merge, trained_share
    from facenb.zoo import build_backbone
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    torch.manual_seed(0)
    plain = CLIPVisionModelWithProjection(CLIPVisionConfig()).eval()  # its defaults are those of B/32
    plain.save_pretrained(tmp_path / "hub")
    assert main(["prepare", "weights", "clip_vit_b32", "--source", str(tmp_path / "hub")]) == 0
    faces = torch.rand(2, 3, 112, 112) * 2 - 1
    net = build_backbone("clip_vit_b32", train="lora")
    assert trained_share(net)[2] < 0.01
    with torch.no_grad():
        pixels = net.resize(faces).clamp(-1, 1) * net.scale + net.shift
        assert (net.eval()(faces) - plain(pixels).image_embeds).abs().max() < 1e-5
        assert torch.equal(load_backbone(tmp_path / "hub")(faces), load_backbone(tmp_path / "data/weights/clip_vit_b32")(faces))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net.train()(faces).square().mean().backward()
        optimizer.step()
    save_trained(net, tmp_path / "run")
    assert sum(file.stat().st_size for file in (tmp_path / "run").iterdir()) < 4e6  # adapters alone
    again = load_backbone(tmp_path / "run")
    with torch.no_grad():
        wanted = net.eval()(faces)
        assert torch.equal(again(faces), wanted) and (merge(again)(faces) - wanted).abs().max() < 1e-5 * wanted.abs().max()
