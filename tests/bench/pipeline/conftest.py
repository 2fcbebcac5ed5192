"""What tests of the picture share."""

import io

import pytest


@pytest.fixture(scope="session")
def fonts_are_open():
    """Matplotlib opens its fonts once and keeps them."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "text")
    figure.savefig(io.BytesIO())
