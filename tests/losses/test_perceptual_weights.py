import hashlib
import http.server
import os
import threading
from pathlib import Path

import pytest
import torch

from losses import ensure_perceptual_weights
from losses.networks import LpipsSlices, import_torchvision
from losses.weights import FILES, WeightsFile, find_weights, read_state_dict
from settings import AutoencoderTraining, ConfigError
from settings.autoencoder import PerceptualSettings


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture
def server(tmp_path):
    """A web server on this machine, as the place to download from."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def serve(server, monkeypatch, content: bytes, name: str | None = None) -> WeightsFile:
    folder, address = server
    name = name or f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content)
    file = WeightsFile(f"{address}/{name}", "a test network")
    monkeypatch.setitem(FILES, "lpips-squeeze", file)
    return file


def test_addresses_are_torchvisions_own():
    import_torchvision()
    from torchvision import models

    published = {
        "lpips-squeeze": models.SqueezeNet1_1_Weights.IMAGENET1K_V1.url,
        "lpips-alex": models.AlexNet_Weights.IMAGENET1K_V1.url,
        "lpips-vgg": models.VGG16_Weights.IMAGENET1K_V1.url,
    }
    assert published == {network: FILES[network].url for network in published}


def test_config_path_of_a_file_or_its_folder_comes_before_the_cache(cache, tmp_path):
    name = FILES["lpips-squeeze"].name
    cache.mkdir(parents=True)
    for path in (cache / name, tmp_path / name, tmp_path / "mine.pth"):
        path.touch()
    assert find_weights("lpips-squeeze", str(tmp_path / "mine.pth")) == tmp_path / "mine.pth"
    assert find_weights("lpips-squeeze", str(tmp_path)) == tmp_path / "squeezenet1_1-b8a52dc0.pth"
    assert find_weights("lpips-squeeze", None) == cache / name
    with pytest.raises(ConfigError, match=r"perceptual.weights: there is no file .*gone.pth; .*SqueezeNet"):
        find_weights("lpips-squeeze", str(tmp_path / "gone.pth"))


def test_download_goes_to_the_cache_once(cache, server, monkeypatch):
    content = os.urandom(3 << 10)
    file = serve(server, monkeypatch, content)
    assert find_weights("lpips-squeeze", None) == cache / file.name
    assert (cache / file.name).read_bytes() == content
    (server[0] / file.name).unlink()
    assert find_weights("lpips-squeeze", None) == cache / file.name


def test_damaged_download_is_reported_and_leaves_nothing_behind(cache, server, monkeypatch):
    serve(server, monkeypatch, b"not what was published", name="net-01234567.pth")
    with pytest.raises(ConfigError, match=r'invalid hash value \(expected "01234567"'):
        find_weights("lpips-squeeze", None)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("network", ["lpips-squeeze", "medicalnet-resnet10"])
def test_offline_and_absent_is_one_sentence_with_file_source_and_place(network, cache, monkeypatch):
    """With a proxy that refuses, so that the test does not depend on this machine's network."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # which remembers the proxies of its first use
    with pytest.raises(ConfigError, match=r"^autoencoder\.training\.perceptual\.weights: .*") as refusal:
        find_weights(network, None)
    for part in (FILES[network].url, str(cache / FILES[network].name), "structural"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_weights_are_looked_for_only_when_they_are_needed(cache, tmp_path):
    def ensure(**changes):
        ensure_perceptual_weights(AutoencoderTraining.model_validate(changes))

    gone = str(tmp_path / "gone.pth")
    ensure(use_perceptual_loss=False, perceptual={"weights": gone})
    ensure(use_perceptual_loss=True, perceptual={"network": "structural", "weights": gone})
    with pytest.raises(ConfigError, match=r"there is no file .*gone.pth"):
        ensure(use_perceptual_loss=True, perceptual={"network": "lpips-alex", "weights": gone})


def test_safetensors_are_read_too(trunk_files, tmp_path):
    from safetensors.torch import save_file

    state = read_state_dict(trunk_files["squeeze"])
    save_file(state, tmp_path / "squeeze.safetensors")
    paths = (trunk_files["squeeze"], tmp_path / "squeeze.safetensors")
    terms = [LpipsSlices(PerceptualSettings(network="lpips-squeeze", weights=str(path)), seed=0) for path in paths]
    for ours, theirs in zip(*(term.state_dict().values() for term in terms), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_other_files_are_refused(trunk_files, tmp_path):
    with pytest.raises(ConfigError, match=r"does not hold the weights of lpips-squeeze \(features.0.weight"):
        LpipsSlices(PerceptualSettings(network="lpips-squeeze", weights=str(trunk_files["alex"])), seed=0)
    (tmp_path / "page.pth").write_text("<html>404</html>")
    with pytest.raises(ConfigError, match=r"page.pth cannot be read as a state dict"):
        read_state_dict(tmp_path / "page.pth")
