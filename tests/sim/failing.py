"""Seeds that have broken something: kept in a file, one a line, and run before all others."""

from pathlib import Path

FILE = Path(__file__).with_name("failing_seeds.txt")


def failing() -> list[int]:
    """The seeds in the file, oldest first."""
    return [int(line.split()[0]) for line in FILE.read_text("utf-8").splitlines() if line.strip()]


def remember(seed: int) -> None:
    """Add a seed, once."""
    if seed not in failing():
        with FILE.open("a", encoding="utf-8") as file:
            file.write(f"{seed}\n")
