"""Which chat templates can be used: export asks before it writes, runtime at load.

Knows Jinja as chat templates use it; knows no prompts and no ids.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(source: str) -> Template:
    """A chat template with the filters and functions templates rely on; `TemplateSyntaxError`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML pages; models were trained on plain JSON.
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
