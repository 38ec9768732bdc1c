"""The head that NearID trains: counted, opened up, trained alone, stored, and in the layouts of others."""
import copy
import json
import socket
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel

from facenb.cards import CardError, read_run, save_trained
from facenb.foundation import SigLip2So400m
from facenb.heads import SigLip2Tiny, attention_map, map_head, probe_attention
from facenb.lora import set_training, trained_share
from facenb.nearid_hub import (HUB, TRAINED, accept_conversion, convert_checkpoint, export_hub, frozen_identity, import_checkpoint,
                               import_hub, load_head, save_head)
from facenb.roles import to_pixels
from facenb.weights import WeightsError
from facenb.zoo import build_backbone

COUNTS = {"probe": 1_152, "attention.in_proj_weight": 3_981_312, "attention.in_proj_bias": 3_456, "attention.out_proj.weight": 1_327_104,
          "attention.out_proj.bias": 1_152, "layernorm.weight": 1_152, "layernorm.bias": 1_152, "mlp.fc1.weight": 4_958_208,
          "mlp.fc1.bias": 4_304, "mlp.fc2.weight": 4_958_208, "mlp.fc2.bias": 1_152}


def tiny(seed: int = 0, train: str = "head", **settings) -> SigLip2Tiny:
    torch.manual_seed(seed)
    return set_training(SigLip2Tiny(image_size=64, **settings).eval(), train)


def pictures(n: int = 3) -> torch.Tensor:
    return torch.rand(n, 3, 64, 64, generator=torch.Generator().manual_seed(7)) * 2 - 1


def see(network) -> torch.Tensor:
    return network.eval()(pictures()).detach()


def shaken(network, by: float = 0.1):
    "Another head on the same frozen network"
    network = copy.deepcopy(network)
    for p in network.parameters():
        if p.requires_grad:
            p.data.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return network


def change(path, **values):
    "Other values in a JSON file; None: without"
    told = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def rewrite(path, of):
    tensors = of(load_file(path))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path)


def test_counts_of_the_published_network():
    with torch.device("meta"):
        real = set_training(SigLip2So400m(image_size=384), "head")
    assert {name: p.numel() for name, p in real.vision.head.named_parameters()} == COUNTS
    assert trained_share(real)[:2] == (15_238_352, 428_225_600) and round(100 * trained_share(real)[2], 3) == 3.558
    assert {name.removeprefix("vision.head.") for name, p in real.named_parameters() if p.requires_grad} == set(COUNTS)
    assert (real.grid, real.input_size) == (27, 384)


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 40}, {"num_attention_heads": 1}], ids=str)
def test_the_open_version_is_transformers_head(settings):
    network = shaken(tiny(config=settings))  # its biases are zero when new
    head, tokens = network.vision.head, network.tokens(pictures()).detach()
    tokens = tokens + torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    assert (map_head(head, tokens) - head(tokens)).abs().max() < 1e-5 * head(tokens).abs().max()
    head, tokens = copy.deepcopy(head).double(), tokens.double()
    assert (map_head(head, tokens) - head(tokens)).abs().max() < 1e-12
    probe = head.probe.expand(len(tokens), -1, -1)
    _, each = head.attention(probe, tokens, tokens, need_weights=True, average_attn_weights=False)
    _, mean = head.attention(probe, tokens, tokens, need_weights=True)
    mine = probe_attention(head, tokens)
    assert mine.shape == (3, head.attention.num_heads, 64)
    assert (mine - each[:, :, 0]).abs().max() < 1e-12 and (mine.mean(1) - mean[:, 0]).abs().max() < 1e-12
    assert mine.std() > 1e-4  # uniform weights would agree with much that is wrong


def test_attention_map_reads_row_by_row():
    network, dark = tiny(), -torch.ones(1, 3, 64, 64)
    for row, column in ((0, 3), (6, 1)):
        bright = dark.clone()
        bright[:, :, 8 * row:8 * row + 8, 8 * column:8 * column + 8] = 1
        moved = (attention_map(network, bright) - attention_map(network, dark)).abs()[0]
        assert divmod(int(moved.argmax()), 8) == (row, column)
    assert torch.allclose(attention_map(network, pictures()).sum((1, 2)), torch.ones(3), atol=1e-6)


@pytest.mark.parametrize("embedding_dim", [128, 8])
def test_training_changes_the_head_and_not_one_bit_of_the_rest(embedding_dim):
    torch.manual_seed(0)
    network = build_backbone("siglip2_tiny", embedding_dim=embedding_dim, train="head").train()
    before = copy.deepcopy(network.state_dict())
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)  # would shrink what has no gradient
    for _ in range(3):
        optimiser.zero_grad()
        network(pictures()).square().sum().backward()
        optimiser.step()
    learns = tuple(f"{name}." for name in network.head)
    assert all((p.grad is not None) == name.startswith(learns) for name, p in network.named_parameters())
    assert all(torch.equal(before[name], value) != name.startswith(learns) for name, value in network.state_dict().items()
               if not name.endswith("in_proj_bias"))  # the keys' part of that one has no gradient but rounding
    assert not torch.equal(before["vision.head.probe"], network.vision.head.probe)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    "Published weights, small: as transformers stores the whole model, both towers"
    from transformers import SiglipConfig, SiglipModel
    torch.manual_seed(5)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "image_size", "hidden_act")
    text = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    model = SiglipModel(SiglipConfig(vision_config={name: SigLip2Tiny.table[name] for name in names}, text_config=text))
    folder = tmp_path_factory.mktemp("siglip")
    model.save_pretrained(folder)
    return folder, model.vision_model.state_dict()


def test_a_head_starts_as_the_published_one_bit_for_bit(siglip, tmp_path):
    folder, published = siglip
    network = build_backbone("siglip2_tiny", weights=folder, train="head")
    head = network.vision.head.state_dict()
    assert len(head) == 11 and all(torch.equal(value, published[f"head.{name}"]) for name, value in head.items())
    assert "sha256" in frozen_identity(network)
    trained = shaken(network)
    save_head(trained, tmp_path)
    assert not torch.equal(see(network), see(trained))
    load_head(network, tmp_path)
    assert torch.equal(see(network), see(trained))
    with pytest.raises(WeightsError, match="random_weights.*give it those"):
        load_head(tiny(), tmp_path)


@pytest.mark.parametrize("embedding_dim", [128, 8])
def test_a_stored_head_is_all_that_was_trained(tmp_path, embedding_dim):
    start, facts = tiny(embedding_dim=embedding_dim), {"loss": "nearid", "alpha": 0.5, "step": 7, "seed": 0, "fingerprint": "0123"}
    trained = shaken(start)
    assert save_head(trained, tmp_path / "new" / "folder", facts) == tmp_path / "new" / "folder"
    stored = load_file(tmp_path / "new" / "folder" / "head.safetensors")
    behind = {"projection.weight", "projection.bias"} if embedding_dim == 8 else set()
    assert stored.keys() == COUNTS.keys() | behind and {value.dtype for value in stored.values()} == {torch.float32}
    card = load_head(start, tmp_path / "new" / "folder")
    assert torch.equal(see(start), see(trained)) and card["facts"] == facts
    assert card["preprocessing"]["mode"] == "bicubic" and card["frozen"] == frozen_identity(trained)
    assert save_trained(trained, tmp_path / "run") and torch.equal(see(read_run(tmp_path / "run")), see(trained))


def test_a_head_of_half_numbers_is_stored_in_full(tmp_path):
    network = tiny()
    network.vision.head.half()
    save_head(network, tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "head.safetensors").values()} == {torch.float32}


BROKEN_HEADS = {  # what is done to the folder; type and text of the error
    "no card": (lambda f: (f / "nearid.json").unlink(), FileNotFoundError, "nearid.json"),
    "no weights": (lambda f: (f / "head.safetensors").unlink(), FileNotFoundError, "head.safetensors"),
    "card cut": (lambda f: (f / "nearid.json").write_text('{"format": 1,'), WeightsError, "nearid.json is not JSON"),
    "list": (lambda f: (f / "nearid.json").write_text("[]"), WeightsError, "nearid.json holds no JSON object"),
    "newer": (lambda f: change(f / "nearid.json", format=2), WeightsError, "nearid.json has format 2"),
    "hash": (lambda f: rewrite(f / "head.safetensors", lambda s: {n: v + 1 for n, v in s.items()}), WeightsError, "head.safetensors is not the file"),
    "cut": (lambda f: (f / "head.safetensors").write_bytes((f / "head.safetensors").read_bytes()[:500]), WeightsError, "head.safetensors cannot be read"),
    "pointer": (lambda f: (f / "head.safetensors").write_text("version https://git-lfs.github.com/spec/v1"), WeightsError, "Git LFS pointer"),
    "unsaid": (lambda f: change(f / "nearid.json", frozen=None), WeightsError, "trained behind the weights None"),
    "pixels": (lambda f: change(f / "nearid.json", preprocessing={"size": 64, "mode": "bilinear"}), WeightsError, "this network reads"),
}


@pytest.mark.parametrize("what", BROKEN_HEADS)
def test_broken_heads_change_nothing(tmp_path, what):
    hurt, error, text = BROKEN_HEADS[what]
    save_head(tiny(), tmp_path)
    hurt(tmp_path)
    network = shaken(tiny())
    before = see(network)
    with pytest.raises(error, match=text):
        load_head(network, tmp_path)
    assert torch.equal(see(network), before)


def test_heads_of_other_networks_change_nothing(tmp_path):
    save_head(tiny(), tmp_path)
    for other, text in ((tiny(1), "this network has"), (tiny(embedding_dim=8), "missing projection.bias, projection.weight"),
                        (tiny(config={"intermediate_size": 64}), "other shape mlp.fc1.bias")):
        before = see(other)
        with pytest.raises(WeightsError, match=text):
            load_head(other, tmp_path)
        assert torch.equal(see(other), before)
    save_head(tiny(embedding_dim=8), tmp_path)
    with pytest.raises(WeightsError, match="unexpected projection"):
        load_head(tiny(), tmp_path)


def test_what_a_head_does_not_describe_is_not_stored(tmp_path):
    with pytest.raises(WeightsError, match="learned more than its head"):
        save_head(tiny(train="scratch"), tmp_path)
    with pytest.raises(WeightsError, match="learned more than its head"):
        save_head(tiny(train="lora"), tmp_path)
    with pytest.raises(WeightsError, match="mobilefacenet has no head that pools"):
        save_head(build_backbone("mobilefacenet"), tmp_path)
    for facts in ({"loss": torch.ones(1)}, {"loss": float("nan")}):
        with pytest.raises(WeightsError, match="nearid.json: facts are not plain values"):
            save_head(tiny(), tmp_path, facts)
    with torch.device("meta"):
        empty = set_training(SigLip2Tiny(image_size=64), "head")
    with pytest.raises(CardError, match="meta device"):
        save_head(empty, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_no_card_beside_another_head(tmp_path, monkeypatch):
    save_head(tiny(), tmp_path)
    from facenb import nearid_hub
    write = nearid_hub.atomic_write

    def killed(path, content):
        if path.name == "nearid.json":
            raise KeyboardInterrupt
        write(path, content)
    monkeypatch.setattr(nearid_hub, "atomic_write", killed)
    with pytest.raises(KeyboardInterrupt):
        save_head(shaken(tiny()), tmp_path)
    with pytest.raises(FileNotFoundError, match="nearid.json"):
        load_head(tiny(), tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "A trained network in the published layout, bilinear"
    network = shaken(tiny(config={"num_hidden_layers": 2}, pixels={"mode": "bilinear"}))
    return network, export_hub(network, tmp_path_factory.mktemp("hub"))


@pytest.fixture
def hub(exported, tmp_path):
    "A copy that may be broken"
    for file in exported[1].iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def half(network):
    return copy.deepcopy(network).half().float()


def test_hub_layout_is_the_published_one(exported):
    network, folder = exported
    told = json.loads((folder / "config.json").read_text())
    assert (told["architectures"], told["model_type"], told["embed_dim"], told["normalize_embeddings"]) == (["NearIDModel"], "nearid", 128, True)
    assert told["auto_map"] == {"AutoConfig": "configuration_nearid.NearIDConfig", "AutoModel": "modeling_nearid.NearIDModel"}
    assert told["vision_config"] == {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "image_size": 64, "patch_size": 8,
        "num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0}
    stored = load_file(folder / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    heads = {name.removeprefix("backbone.vision_model.head.") for name in stored if ".head." in name}
    assert heads == COUNTS.keys()
    parts = {name.split(".")[2] for name in stored if name.startswith("backbone.vision_model.")}
    assert parts == {"embeddings", "encoder", "post_layernorm", "head"} and len(stored) == len(network.vision.state_dict())


@pytest.mark.parametrize("names", ["backbone.vision_model.", "backbone."])
def test_hub_folder_comes_back_in_both_namings(exported, hub, names):
    network = exported[0]
    rewrite(hub / "model.safetensors", lambda s: {names + name.removeprefix(HUB): value for name, value in s.items()})
    back = import_hub(hub)
    assert torch.equal(see(back), see(half(network))) and back.pixels == network.pixels and back.training_mode == "head"
    assert torch.nn.functional.cosine_similarity(see(back), see(network)).min() > 0.9999
    again = export_hub(back, hub / "again")  # half precision is reached once
    theirs, mine = load_file(hub / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(theirs[names + name.removeprefix(HUB)], value) for name, value in mine.items()) and len(theirs) == len(mine)
    save_trained(back, hub / "run")
    assert torch.equal(see(read_run(hub / "run")), see(back))


def test_a_real_table_and_a_folder_of_the_real_network_agree():
    "config.json of the published model, built without memory"
    from facenb.nearid_hub import build_hub, hub_config
    with torch.device("meta"):
        real = SigLip2So400m(image_size=384)
        told = hub_config(real)
        back = build_hub(told["vision_config"], {"size": 384, "mode": "bilinear"}, None)
    assert told["vision_config"] == {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
        "num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0}
    assert told["embed_dim"] == 1152 and back.settings["config"] == {}
    assert {n: v.shape for n, v in back.vision.state_dict().items()} == {n: v.shape for n, v in real.vision.state_dict().items()}


def test_transformers_reads_the_folder_with_the_code_in_it(exported, monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("no network is needed")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    network, folder = exported
    theirs, report = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__ == "NearIDConfig"
    with torch.no_grad():
        out = theirs.eval()(pictures(), output_hidden_states=True)
        raw, unit = theirs.get_image_features(pictures(), normalize=False), theirs.get_image_features(pictures())
    assert torch.allclose(raw, see(half(network)), atol=1e-5) and torch.equal(raw, out.pooler_output) and torch.equal(unit, out.image_embeds)
    assert torch.allclose(unit.norm(dim=1), torch.ones(3), atol=1e-6) and out.last_hidden_state.shape == (3, 64, 128)
    assert len(out.hidden_states) == 3
    stored = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float16).eval()
    assert stored.get_image_features(pictures()).dtype == torch.float16  # takes pixels of any kind
    theirs.half().save_pretrained(tmp_path)  # writes names of its own
    (tmp_path / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    assert torch.equal(see(import_hub(tmp_path)), see(half(network)))


@pytest.mark.parametrize("resample, mode", [(2, "bilinear"), (3, "bicubic")])
def test_pixels_are_those_of_the_processor_in_the_folder(hub, resample, mode):
    change(hub / "preprocessor_config.json", resample=resample)
    back = import_hub(hub)
    assert back.pixels["mode"] == mode
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    theirs = AutoImageProcessor.from_pretrained(hub, backend="pil")(images=image, return_tensors="pt")["pixel_values"][0]
    mine = torch.from_numpy(to_pixels(image, 64, back.pixels["mode"]).copy()).permute(2, 0, 1) / 127.5 - 1
    assert (theirs - mine).abs().max() < 1e-5
    other = torch.from_numpy(to_pixels(image, 64, {"bilinear": "bicubic", "bicubic": "bilinear"}[mode]).copy()).permute(2, 0, 1) / 127.5 - 1
    assert (theirs - other).abs().max() > 0.05


@pytest.mark.parametrize("hurt, text", [(lambda f: f.unlink(), "preprocessor_config.json is missing: bicubic"),
                                        (lambda f: change(f, resample=None), "has no resample: bicubic")], ids=["file", "resample"])
def test_assumed_pixels_are_told(hub, hurt, text):
    hurt(hub / "preprocessor_config.json")
    with pytest.warns(UserWarning, match=text):
        assert import_hub(hub).pixels == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "mode": "bicubic", "size": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_hub(import_hub_quietly(hub), hub)
        import_hub(hub)  # which says all


def import_hub_quietly(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_hub(folder)


def vision(folder, **values):
    told = json.loads((folder / "config.json").read_text())["vision_config"] | values
    change(folder / "config.json", vision_config={key: value for key, value in told.items() if value is not None})


BROKEN_HUBS = {  # what is done to the folder; text of the error
    "type": (lambda f: change(f / "config.json", model_type="siglip"), "config.json: model_type 'siglip'"),
    "authors' training": (lambda f: change(f / "config.json", vision_config=None, pooling="map"), "config.json: .* needed nearid with a vision_config"),
    "list": (lambda f: change(f / "config.json", vision_config=[1]), "needed nearid with a vision_config"),
    "unsaid size": (lambda f: vision(f, hidden_size=None), "config.json: vision_config has hidden_size None"),
    "text": (lambda f: vision(f, patch_size="8"), "patch_size '8'"),
    "true": (lambda f: vision(f, num_hidden_layers=True), "num_hidden_layers True"),
    "heads": (lambda f: vision(f, num_attention_heads=7), "config.json: its vision_config cannot be built: embed_dim must be divisible"),
    "activation": (lambda f: vision(f, hidden_act="swish"), "config.json: its vision_config cannot be built: hidden_act='swish'"),
    "grey": (lambda f: vision(f, num_channels=1), "num_channels 1"),
    "deeper": (lambda f: vision(f, num_hidden_layers=3), "model.safetensors does not fit: missing encoder.layers.2"),
    "shallower": (lambda f: vision(f, num_hidden_layers=1), "model.safetensors does not fit: unexpected encoder.layers.1"),
    "wider": (lambda f: vision(f, intermediate_size=100), "other shape encoder.layers.0.mlp.fc1.bias"),
    "pixels": (lambda f: change(f / "preprocessor_config.json", size={"height": 128, "width": 128}), "preprocessor_config.json: size .*128.*height and width 64"),
    "oblong": (lambda f: change(f / "preprocessor_config.json", size={"height": 64, "width": 32}), "preprocessor_config.json: size"),
    "short side": (lambda f: change(f / "preprocessor_config.json", size={"shortest_edge": 64}), "preprocessor_config.json: size"),
    "crop": (lambda f: change(f / "preprocessor_config.json", do_center_crop=True, crop_size={"height": 64, "width": 64}), "crops or does not resize"),
    "lanczos": (lambda f: change(f / "preprocessor_config.json", resample=1), "preprocessor_config.json: resample 1"),
    "probe twice": (lambda f: rewrite(f / "model.safetensors", lambda s: s | {"backbone.head.probe": torch.zeros(1, 1, 128)}), "head.probe twice"),
    "no probe": (lambda f: rewrite(f / "model.safetensors", lambda s: {n: v for n, v in s.items() if not n.endswith("probe")}), "missing head.probe"),
    "text tower": (lambda f: rewrite(f / "model.safetensors", lambda s: s | {"text_model.x": torch.ones(1)}), "unexpected text_model.x"),
    "int8": (lambda f: rewrite(f / "model.safetensors", lambda s: {n: v.to(torch.int8) for n, v in s.items()}), "whole numbers embeddings"),
    "NaN": (lambda f: rewrite(f / "model.safetensors", lambda s: {n: v * float("nan") for n, v in s.items()}), "holds NaN or infinity"),
    "pickle": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n."),
               "model.safetensors cannot be read"),
}


@pytest.mark.parametrize("what", BROKEN_HUBS)
def test_broken_hub_folders_are_named(hub, what):
    hurt, text = BROKEN_HUBS[what]
    hurt(hub)
    with pytest.raises(WeightsError, match=text) as told:
        import_hub(hub)
    assert str(hub) in str(told.value)


def test_what_the_layout_cannot_describe_is_not_exported(tmp_path):
    large = tiny()
    large.vision.head.mlp.fc1.weight.data[0, 0] = 1e6
    for network, text in ((tiny(embedding_dim=8), "has a layer behind its head"), (tiny(train="lora"), "facenb.lora.merge"),
                          (large, "not finite in float16: backbone.vision_model.head.mlp.fc1.weight")):
        with pytest.raises(WeightsError, match=text):
            export_hub(network, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def checkpoint(network) -> dict[str, torch.Tensor]:
    "Tensors as the authors' training stores them: with a head and a normalisation that are not used"
    state = network.vision.state_dict()
    old = {f"{TRAINED}head.{name}": torch.zeros_like(value) for name, value in network.vision.head.state_dict().items()}
    post = {f"encoder_wrapper.post_ln.{name}": torch.zeros(128) for name in ("weight", "bias")}
    head = {f"head.map_pooler.{name}": value for name, value in network.vision.head.state_dict().items()}
    return {f"{TRAINED}{name}": value for name, value in state.items() if not name.startswith("head.")} | old | post | head


def test_a_training_checkpoint_becomes_the_hub_layout(exported, tmp_path):
    network, folder = exported
    converted, stored = convert_checkpoint(checkpoint(network)), load_file(folder / "model.safetensors")
    assert converted.keys() == stored.keys() and all(torch.equal(value, stored[name]) for name, value in converted.items())
    save_file({name: value.clone() for name, value in checkpoint(network).items()}, tmp_path / "c.safetensors")
    config = dict(network.table) | network.settings["config"]
    back = import_checkpoint(tmp_path / "c.safetensors", {"size": 64, "mode": "bilinear"}, config)
    assert torch.equal(see(back), see(half(network))) and back.pixels == network.pixels
    assert torch.equal(see(import_hub(export_hub(back, tmp_path / "hub"))), see(back))
    torch.save(checkpoint(network), tmp_path / "c.pth")
    assert torch.equal(see(import_checkpoint(tmp_path / "c.pth", {"size": 64, "mode": "bilinear"}, config)), see(back))


@pytest.mark.parametrize("hurt, text", [
    (lambda s: s | {"head.projector.weight": torch.ones(2, 2)}, "head.projector.weight"),
    (lambda s: {n: v for n, v in s.items() if not n.startswith("head.")}, "it has no head"),
    (lambda s: {n: v for n, v in s.items() if not n.startswith(TRAINED)}, "it has no embeddings, encoder, post_layernorm"),
    (lambda s: s | {"head.map_pooler.probe": torch.full((1, 1, 128), 1e6)}, "not finite in float16: .*head.probe"),
    (lambda s: s | {"head.map_pooler.probe": torch.ones(1, 1, 128, dtype=torch.int8)}, "whole numbers: .*head.probe"),
    (lambda s: {}, "no training checkpoint"),
], ids=["other head", "no head", "no encoder", "large", "int8", "empty"])
def test_other_checkpoints_are_not_converted(exported, hurt, text):
    with pytest.raises(WeightsError, match=text):
        convert_checkpoint(hurt(checkpoint(exported[0])))


def test_a_checkpoint_without_one_tensor_is_not_read(exported, tmp_path):
    tensors = {name: value.clone() for name, value in checkpoint(exported[0]).items() if name != "head.map_pooler.mlp.fc2.bias"}
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(WeightsError, match="c.safetensors does not fit: missing head.mlp.fc2.bias"):
        import_checkpoint(tmp_path / "c.safetensors", {"size": 64, "mode": "bilinear"}, dict(SigLip2Tiny.table) | {"num_hidden_layers": 2})


class Fixed(torch.nn.Module):
    "A network that says what it is told to"

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, _):
        return self.rows


@pytest.mark.parametrize("after, fine", [
    ([[1.0, 0.0]], True), ([[1.009, 0.0]], True), ([[1.011, 0.0]], False), ([[float("nan"), 0.0]], False)], ids=str)
def test_acceptance_by_the_largest_difference(after, fine):
    compare = lambda: accept_conversion(Fixed([[1.0, 0.0]]), Fixed(after), None)
    if fine:
        return compare()
    with pytest.raises(WeightsError, match="the conversion changed embeddings"):
        compare()


def test_acceptance_by_the_worst_direction():
    accept_conversion(Fixed([[0.1, 0.0]]), Fixed([[0.1, 0.004]]), None)  # cosine .9992
    with pytest.raises(WeightsError, match="cosine 0.9985"):
        accept_conversion(Fixed([[1.0, 0.0], [0.1, 0.0]]), Fixed([[1.0, 0.0], [0.1, 0.0055]]), None)  # the second row
