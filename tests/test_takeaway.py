"""Backbones in and out: cards, ONNX, hub folders and everything load_backbone reads or refuses."""
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from facenb import zoo
from facenb.backbones import BACKBONES, SmallFaceNet
from facenb.cards import CardError, load_card, read_backbone, save_backbone, tensors_of
from facenb.hub import FaceModel, hub_folder, model_card
from facenb.load import LoadError, load_backbone
from facenb.onnx_models import OnnxError, export_onnx, random_faces
from facenb.weights import WeightsError
from facenb.zoo import build_backbone

DATA = os.environ.get("FACENB_DATA")
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, patch_size=8, image_size=32)
TINY = {"clip_vit_b32": SIZES | {"intermediate_size": 48, "projection_dim": 24}, "dinov2_vit_b14": SIZES,
        "ijepa_vit_h14": SIZES | {"intermediate_size": 48}, "siglip2_so400m": SIZES | {"intermediate_size": 48}}
DEEPER = {"iresnet34", "iresnet50", "iresnet100"}  # the class of iresnet18, and slow
WITH_TIMM = ["timm:test_vit", "timm:test_resnet"] if hasattr(zoo, "timm_backbone") or hasattr(zoo, "TimmBackbone") else []
NAMES = [*sorted(BACKBONES.keys() - DEEPER), *WITH_TIMM]


def built(name: str, image_size: int = 32, embedding_dim: int = 16):
    "A small network of the class, its running statistics moved away from where they start"
    torch.manual_seed(0)
    options = {"config": TINY[name], "pixels": {"size": 32}} if name in TINY else {}
    size = 24 if name in TINY else image_size
    net = zoo.backbone_entry(name).build(image_size=size, embedding_dim=embedding_dim, weights=None, **options)
    net.name = name
    net.train()(random_faces(8, size))
    return net.eval()


def agree(a, b, faces, tolerance: float) -> bool:
    "Embeddings differ by less than a share of their length"
    with torch.no_grad():
        za, zb = a(faces), b(faces)
    return za.shape == zb.shape and bool(((za - zb).norm(dim=1) <= tolerance * zb.norm(dim=1)).all())


@pytest.mark.parametrize("name", NAMES)
def test_card_and_weights_come_back(name, tmp_path):
    net = built(name)
    again = load_backbone(save_backbone(net, tmp_path / "a", {"loss": "infonce"}))
    assert agree(again, net, random_faces(3, net.image_size), 1e-6)
    card = load_card(tmp_path / "a")
    assert (card["backbone"], again.name, again.embedding_dim, again.training) == (name, name, 16, False)
    assert card["record"] == {"loss": "infonce"}


@pytest.mark.skipif(not WITH_TIMM, reason="no timm yet")
@pytest.mark.parametrize("embedding_dim", [0, 16])
def test_statistics_and_own_features_of_timm_come_back(embedding_dim, tmp_path):
    net = zoo.backbone_entry("timm:test_vit").build(image_size=32, embedding_dim=embedding_dim, statistics="timm").eval()
    again = load_backbone(save_backbone(net, tmp_path / "a"))
    assert again.statistics == "timm" and agree(again, net, random_faces(2, 32), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_onnx_comes_back(name, tmp_path):
    pytest.importorskip("onnxscript")
    net = built(name)
    again = load_backbone(export_onnx(net, tmp_path / "a.onnx"))
    for count in (1, 2, 7):
        assert agree(again, net, random_faces(count, net.image_size), 1e-5), count
    assert again.card["backbone"] == name


FRESH = """
import sys, torch
from pathlib import Path
for name in ("onnx", "onnxscript", "onnxruntime"):
    sys.modules[name] = None  # as if it were not installed
from facenb.hub import FaceModel
from facenb.load import load_backbone
from facenb.onnx_models import export_onnx
root = Path(sys.argv[1])
for folder in sorted(root.iterdir()):
    faces, z = torch.load(folder / "z.pt", weights_only=True)
    with torch.no_grad():
        for got in (load_backbone(folder)(faces), FaceModel.from_pretrained(folder, unit_length=False)(faces)):
            assert (got - z).abs().max() <= 1e-6, folder
        unit = FaceModel.from_pretrained(folder)(faces)
        assert (unit - torch.nn.functional.normalize(z)).abs().max() <= 1e-6, folder
    print(folder.name)
(folder / "b.onnx").touch()
for use in (export_onnx, lambda net, path: load_backbone(path)):
    try:
        use(load_backbone(folder), folder / "b.onnx")
    except ImportError as error:
        print(str(error).replace(" ", "_"))
"""


def test_hub_folders_load_in_a_fresh_interpreter_without_onnx(tmp_path):
    for name in NAMES:
        net, folder = built(name), tmp_path / name.replace(":", "_")
        hub_folder(net, folder)
        torch.save((random_faces(2, net.image_size), net(random_faces(2, net.image_size)).detach()), folder / "z.pt")
    done = subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(NAMES) + 2 and done.stdout.count("pip_install_facenb[onnx]") == 2


def adapted(name: str = "clip_vit_b32"):
    lora = pytest.importorskip("facenb.lora")
    net = built(name)
    base = {key: value.clone() for key, value in tensors_of(net).items()}
    lora.set_training(net, "lora", rank=2, alpha=4)
    for key, weight in net.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.1)
    return lora, net.eval(), base


def test_adapters_come_back_with_card_hub_folder_and_onnx(tmp_path):
    _, net, _ = adapted()
    faces = random_faces(3, 24)
    assert agree(load_backbone(save_backbone(net, tmp_path / "a")), net, faces, 1e-6)
    assert load_card(tmp_path / "a")["lora"] == {"rank": 2, "alpha": 4, "targets": "feed-forward", "dropout": 0.0}
    assert agree(load_backbone(hub_folder(net, tmp_path / "b")), net, faces, 1e-6)
    pytest.importorskip("onnxscript")
    assert agree(load_backbone(export_onnx(net, tmp_path / "c.onnx")), net, faces, 1e-5)


def test_adapters_alone_need_the_network_they_were_learned_beside(tmp_path):
    lora, net, base = adapted("timm:test_vit")
    lora.save_adapter(net, tmp_path / "adapter")
    with pytest.raises(CardError, match="beside random weights of timm:test_vit"):
        load_backbone(tmp_path / "adapter")
    save_file(base, tmp_path / "base.safetensors")
    assert agree(load_backbone(tmp_path / "adapter", weights=tmp_path / "base.safetensors"), net, random_faces(2, 32), 1e-6)
    save_file({key: value + 1 for key, value in base.items()}, tmp_path / "other.safetensors")
    with pytest.raises(lora.AdapterError, match="holds adapters for timm:test_vit"):
        load_backbone(tmp_path / "adapter", weights=tmp_path / "other.safetensors")


def test_a_run_with_a_card_and_one_without(tmp_path):
    from facenb.runs import Run
    net = built("small")
    for kind in ("old", "new"):
        run = Run(tmp_path / kind, {"backbone": "small", "image_size": 32, "embedding_dim": 16})
        save_backbone(net, run.staging)
        if kind == "old":
            (run.staging / "backbone.json").unlink()
        run.finish({}, {}, {}, {})
        assert agree(load_backbone(run.folder), net, random_faces(2, 32), 1e-6)


@pytest.mark.skipif("iresnet18" not in BACKBONES, reason="no IResNet yet")
def test_insightface_files_are_recognised(tmp_path):
    for name in ("iresnet18", "mobilefacenet"):
        net = built(name, image_size=48, embedding_dim=32)
        torch.save({f"module.{key}": value for key, value in net.state_dict().items()}, tmp_path / "backbone.pth")
        again = load_backbone(tmp_path / "backbone.pth")
        assert (again.name, again.image_size, again.embedding_dim) == (name, 48, 32)
        assert agree(again, net, random_faces(2, 48), 1e-6)


@pytest.mark.skipif(not DATA or not WITH_TIMM, reason="FACENB_DATA is not set, or no timm yet")
def test_a_real_face_model_goes_through_all_formats(tmp_path):
    path = Path(DATA) / "models" / "edgeface_xxs.safetensors"
    net = load_backbone(path, backbone="timm:edgenext_xx_small", image_size=112, embedding_dim=512)
    faces = random_faces(2, 112)
    assert agree(load_backbone(save_backbone(net, tmp_path / "a")), net, faces, 1e-6)
    assert agree(load_backbone(hub_folder(net, tmp_path / "b")), net, faces, 1e-6)
    pytest.importorskip("onnxscript")
    assert agree(load_backbone(export_onnx(net, tmp_path / "c.onnx")), net, faces, 1e-5)


@pytest.mark.skipif(not DATA, reason="FACENB_DATA is not set")
def test_a_detector_is_refused_with_its_outputs():
    pytest.importorskip("onnxruntime")
    with pytest.raises(OnnxError, match="face_detection_yunet_2026may.onnx is not a recognition model.*cls_8"):
        load_backbone(Path(DATA) / "models" / "face_detection_yunet_2026may.onnx")


# refusals


class Writes:
    "Pickled, it would make a file"

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_run(tmp_path):
    torch.save({"conv1.weight": torch.ones(2), "fc": Writes(tmp_path / "ran")}, tmp_path / "backbone.pth")
    for options in ({}, {"backbone": "small"}):
        with pytest.raises(WeightsError, match="backbone.pth"):
            load_backbone(tmp_path / "backbone.pth", **options)
    assert not (tmp_path / "ran").exists()


def test_wrong_width_and_a_classifier_are_refused_by_name(tmp_path):
    net = built("small")
    torch.save(net.state_dict(), tmp_path / "narrow.pth")
    with pytest.raises(WeightsError, match="narrow.pth(.|\n)*embedding.1.weight"):
        load_backbone(tmp_path / "narrow.pth", backbone="small", image_size=32, embedding_dim=8)
    torch.save(net.state_dict() | {"classifier.weight": torch.ones(1000, 16)}, tmp_path / "classes.pth")
    with pytest.raises(WeightsError, match="classes.pth(.|\n)*classifier"):
        load_backbone(tmp_path / "classes.pth", backbone="small", image_size=32, embedding_dim=16)


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / "backbone.safetensors").write_bytes((folder / "backbone.safetensors").read_bytes()[:-9]),
     "copied in part"),
    (lambda folder: edit(folder / "backbone.json", sha256="0" * 64), "sha256 differs"),
    (lambda folder: edit(folder / "backbone.json", format=2), "has format 2"),
    (lambda folder: edit(folder / "backbone.json", backbone="resnet"), "'resnet'"),
    (lambda folder: edit(folder / "backbone.json", image_size=None), "image_size should be int"),
])
def test_a_damaged_folder_is_refused_by_name(damage, message, tmp_path):
    folder = save_backbone(built("small"), tmp_path / "a")
    damage(folder)
    with pytest.raises(CardError, match=message) as error:
        load_backbone(folder)
    assert str(folder) in str(error.value)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_transformers_folders_are_told_by_their_model_type(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nearid", "auto_map": {"AutoModel": "modeling_nearid.NearIDModel"}}')
    (tmp_path / "modeling_nearid.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(LoadError, match="model_type 'nearid'"):
        load_backbone(tmp_path)
    assert not (tmp_path / "ran").exists()


# atomicity


SAVES = {
    "backbone.safetensors": lambda net, folder: save_backbone(net, folder),
    "backbone.json": lambda net, folder: save_backbone(net, folder),
    "target": lambda net, folder: hub_folder(net, folder),
    "m.onnx": lambda net, folder: export_onnx(net, folder / "m.onnx"),
}


def dies_before(file: str, net, folder: Path) -> None:
    "In a child: killed when the finished file is about to get its name"
    torch.set_num_threads(1)
    replace = os.replace
    os.replace = lambda old, new: os.kill(os.getpid(), signal.SIGKILL) if Path(new).name == file else replace(old, new)
    SAVES[file](net, folder)


@pytest.mark.parametrize("file", SAVES)
def test_killed_while_writing_leaves_no_half_file(file, tmp_path):
    if file == "m.onnx":
        pytest.importorskip("onnxscript")
    net, target = built("small"), tmp_path / "target"
    child = multiprocessing.get_context("fork").Process(target=dies_before, args=(file, net, target))
    child.start(), child.join(100)
    assert child.exitcode == -signal.SIGKILL
    assert not (target / file).exists() and target.exists() == (file != "target")
    with pytest.raises(FileNotFoundError if "backbone" in file else (LoadError, FileNotFoundError)):
        read_backbone(target) if "backbone" in file else load_backbone(target)
    again = SAVES[file](net, target)
    if file != "m.onnx":
        assert agree(load_backbone(again), net, random_faces(2, 32), 1e-6)


# what a model card says, and the sum with the mirror image


def test_model_card_has_the_numbers_of_a_published_record():
    from facenb.runs import PUBLISHED, read_record
    record = read_record(next(iter(sorted(PUBLISHED.glob("*/record.json")))))
    told, text = record["metrics"], model_card(FaceModel.of(built("small"), record).card, record, "x")
    assert f"| {100 * told['accuracy_best']:.2f} | {100 * told['accuracy_at_far']:.2f} |" in text
    assert record["git"]["commit"] in text and f"{told['pixels_eer']:.4f}" not in text
    assert "None" not in text and "nan" not in text
    for metrics in ({}, {"accuracy_best": None}, {"eer": 0.1}):
        text = model_card(FaceModel.of(built("small"), record).card, record | {"metrics": metrics}, "x")
        assert "None" not in text and ("Not measured." in text) == (metrics != {"eer": 0.1})


def test_flip_is_added_before_the_length_is_set():
    from facenb.embed import embed
    net = built("small")
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    model = FaceModel.of(net)
    for flip in (True, False):
        assert torch.allclose(model.embed(pixels, flip), torch.from_numpy(embed(net, pixels, flip)), atol=1e-6)
    assert torch.allclose(F.normalize(net(random_faces(2, 32))), model(random_faces(2, 32)), atol=1e-6)


def test_a_name_is_needed_to_build_again(tmp_path):
    class Mine(SmallFaceNet):
        pass
    with pytest.raises(CardError, match="Mine is no name of a backbone"):
        save_backbone(Mine(24, 16), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def published_timm(tmp_path, monkeypatch):
    "Weights of a timm network as `facenb prepare weights --source` leaves them"
    import timm
    from facenb.published import fetch
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    source = tmp_path / "source"
    source.mkdir()
    torch.manual_seed(1)
    save_file(timm.create_model("test_vit").state_dict(), source / "model.safetensors")
    fetch("timm:test_vit", source)
    return source


@pytest.mark.parametrize("dim, statistics", [(None, None), (32, None), (32, {"statistics": "faces"})])
def test_adapters_beside_published_weights_come_back(published_timm, tmp_path, dim, statistics):
    "Also with pixels other than usual: they are stored with the adapters and win"
    from facenb.cards import save_trained
    net = build_backbone("timm:test_vit", 40, dim, weights="pretrained", train="lora", settings=statistics)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    save_trained(build_backbone("small"), tmp_path / "run")  # an older one must not win
    save_trained(net, tmp_path / "run")
    faces = torch.rand(2, 3, 40, 40) * 2 - 1
    again = load_backbone(tmp_path / "run")
    assert (again(faces) - net.eval()(faces)).abs().max() < 1e-5 and again.settings == net.settings
    hub_folder(tmp_path / "run", tmp_path / "hub")
    assert (load_backbone(tmp_path / "hub")(faces) - net(faces)).abs().max() < 1e-5


def test_adapters_without_their_base_say_what_to_give(published_timm, tmp_path, monkeypatch):
    from facenb.cards import save_trained
    save_trained(build_backbone("timm:test_vit", 40, weights="pretrained", train="lora"), tmp_path / "run")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(CardError, match=r"load_backbone\(folder, weights=FILE\)"):
        load_backbone(tmp_path / "run")
    assert load_backbone(tmp_path / "run", weights=published_timm).training_mode == "lora"


def test_a_timm_folder_of_the_hub_loads(published_timm):
    (published_timm / "config.json").write_text(json.dumps({"architecture": "test_vit"}))
    net = load_backbone(published_timm, image_size=40)
    assert net.name == "timm:test_vit" and net.statistics == "timm" and net.origin["sha256"]


@pytest.mark.parametrize("mode", ["head", "frozen"])
def test_what_learned_is_what_learns_again(tmp_path, mode):
    net = build_backbone("small", 24, 16, train=mode)
    again = load_backbone(save_backbone(net, tmp_path))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in net.parameters()]


def test_names_around_a_network_are_taken_off(tmp_path):
    net = build_backbone("iresnet18", 32, 16).eval()
    torch.save({"state_dict": {f"module.backbone.{name}": value for name, value in net.state_dict().items()}}, tmp_path / "x.pth")
    faces = torch.rand(2, 3, 32, 32) * 2 - 1
    assert torch.equal(load_backbone(tmp_path / "x.pth", image_size=32)(faces), net(faces))


def test_an_iresnet_of_another_size_is_asked_for(tmp_path):
    net = build_backbone("iresnet18", 56, 16).eval()
    torch.save(net.state_dict(), tmp_path / "x.pth")
    with pytest.warns(UserWarning, match=r"image_size=\.\.\.\) says which"):
        assert load_backbone(tmp_path / "x.pth").image_size == 64
    assert load_backbone(tmp_path / "x.pth", image_size=56).image_size == 56


@pytest.mark.parametrize("names", [("Sub_0", "Mul_0"), ("/Sub", "/Mul"), ("", "")])
@pytest.mark.parametrize("shift, scale, pixels", [(127.5, 1 / 127.5, True), (0.0, 1.0, False)])
def test_pixels_are_known_by_numbers_not_names(names, shift, scale, pixels):
    from onnx import TensorProto, helper
    from facenb.onnx_models import wants_pixels
    nodes = [helper.make_node("Sub", ["x", "shift"], ["a"], name=names[0]), helper.make_node("Mul", ["a", "scale"], ["y"], name=names[1])]
    numbers = [helper.make_tensor(name, TensorProto.FLOAT, [1], [value]) for name, value in (("shift", shift), ("scale", scale))]
    graph = helper.make_graph(nodes, "g", [], [], numbers)
    assert wants_pixels(helper.make_model(graph)) == pixels
