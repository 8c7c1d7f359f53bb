"""Package `megatron`; settings of the tools are in pyproject.toml, the versions that are tested in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

setup(
    name="megatron",
    version="0.1.0",
    description="Training large transformer language models with tensor and pipeline parallelism, on GPUs and on CPUs",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron": ["py.typed", "tasks/serving/page.html"]},
    install_requires=[
        "torch>=2.9",
        "numba>=0.61",
        "numpy>=1.26",
        "pyyaml>=6",
        "sentencepiece>=0.2",
        "tensorboard>=2.15",
        "tokenizers>=0.20",
        "sentencex>=1.0",
        "backports.zstd>=1.0; python_version < '3.14'",
        "tqdm>=4.66",
        "zlib-ng>=0.5; platform_machine in 'x86_64 aarch64 AMD64 arm64'",
    ],
    extras_require={
        "parquet": ["pyarrow>=15"],
        # An ASGI application and its server, both small, of few dependencies and in wide use.
        "serve": ["starlette>=0.40", "uvicorn>=0.30"],
        "lm-eval": ["lm-eval>=0.4.9"],
        "test": [
            "hypothesis",
            "matplotlib",
            "mypy",
            "pyarrow",
            "pytest",
            "ruff",
            "safetensors",
            "starlette",
            "transformers",
            "types-PyYAML",
            "types-tqdm",
            "uvicorn",
        ],
    },
)
