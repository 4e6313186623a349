"""Self-contained HTML pages: our own scripts and styles inline, data packed, nothing else allowed to run.

Text of models and files reaches a page in two ways only: escaped by `html.escape`, or inside `pack`, which is
base64 and so holds no markup. A content security policy names the hash of our script: another one, however it got
into the page, does not run, and the page loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from tepo.core.text import plain


def pack(value: Any) -> str:
    """Return a value as JSON, compressed, in base64; what is not a finite number is null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    raw = text.encode("utf-8", errors="replace")
    return base64.b64encode(gzip.compress(raw, compresslevel=6, mtime=0)).decode("ascii")


def finite(value: Any) -> Any:
    """Return plain values with NaN and infinities replaced by None, which is what JSON has for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def significant(value: float, digits: int = 4) -> float | None:
    """Return a number with so many significant digits, None where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def escape(text: object) -> str:
    """Return text safe to stand in HTML, in an element or a quoted attribute: shown, never obeyed."""
    return html.escape(plain(str(text)), quote=True)


def page(*, title: str, body: str, scripts: Sequence[str], data: Mapping[str, str]) -> str:
    """Return a whole HTML document.

    `body` is markup whose texts went through `escape`; `scripts` are files of `pages/` in order; `data` maps ids to
    packed values.
    """
    script = "\n".join(_file(name) for name in scripts)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    blocks = "\n".join(f'<script type="text/plain" id="data-{name}">{block}</script>' for name, block in data.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_file("style.css")}
</style>
</head>
<body>
{body}
{blocks}
<script>{script}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return resources.files("tepo.lab").joinpath("pages", name).read_text(encoding="utf-8")
