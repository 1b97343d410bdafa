"""What the user typed becomes a configuration, or one clear sentence."""

import json
import socket
from pathlib import Path

import pytest

from llmem.errors import LlmemError
from llmem.models.source import resolve

TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> socket.socket:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_preset_hands_out_its_own_copy() -> None:
    first = resolve("opt-125m")
    assert (first.name, first.origin) == ("opt-125m", "preset")
    assert first.config["_name_or_path"] == "facebook/opt-125m"
    first.config["hidden_size"] = 1
    assert resolve("opt-125m").config["hidden_size"] == 768


def test_preset_notes_reach_the_report() -> None:
    assert any("MXFP4" in note for note in resolve("gpt-oss-20b").notes)
    assert resolve("gpt2").notes == ()


def test_folder_and_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    folder = resolve(tmp_path)
    assert (folder.origin, folder.config, folder.path) == ("folder", TINY, str(tmp_path))
    single = resolve(str(file))
    assert (single.origin, single.config, single.path) == ("file", TINY, str(tmp_path))


def test_mapping_is_a_configuration() -> None:
    source = resolve(TINY)
    assert (source.name, source.origin, source.config) == ("llama", "config", TINY)
    assert source.config is not TINY


def test_quantised_checkpoint_is_noted() -> None:
    source = resolve({**TINY, "quantization_config": {"quant_method": "mxfp4"}})
    assert source.notes == (
        "llama is stored quantised (mxfp4); its weights are counted dequantised",
    )


def test_hub_id_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = resolve("someone/tiny")
    assert (source.origin, source.config, source.path) == ("hub cache", TINY, str(snapshot))


@pytest.mark.usefixtures("no_network")
class TestOffline:
    def test_unknown_names_the_nearest_presets(self) -> None:
        with pytest.raises(
            LlmemError, match=r"no model 'llama-3.1-8' .*did you mean llama-3\.1-8b"
        ):
            resolve("llama-3.1-8")

    def test_unknown_hub_id(self) -> None:
        with pytest.raises(LlmemError, match=r"no model 'nobody/zzzzzzzz'.*`llmem models` lists"):
            resolve("nobody/zzzzzzzz")

    def test_download_is_tried_when_the_hub_answers(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(TINY))
        asked = []

        def download(repo_id: str, filename: str, **_: object) -> str:
            asked.append((repo_id, filename))
            return str(file)

        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        assert resolve("someone/not-cached").origin == "hub"
        assert asked == [("someone/not-cached", "config.json")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a JSON object"),
        ('{"hidden_size": 8}', "names no model class"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(LlmemError, match=sentence):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("./nowhere", "no file or folder"), ("x.json", "no file or folder"), (" ", "has no name")],
)
def test_bad_paths(name: str, sentence: str) -> None:
    with pytest.raises(LlmemError, match=sentence):
        resolve(name)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(LlmemError, match=r"holds no config\.json"):
        resolve(tmp_path)
