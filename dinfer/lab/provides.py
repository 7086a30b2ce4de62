"""What core and other layers get from this one, see `dinfer.core.provided`."""

ADDRESSES = {
    "as_html": "dinfer.lab.notebooks:as_html",
}
