"""Settings as fields of a frozen dataclass: each field's metadata describes the setting and checks its value."""

import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

from vllm_hybrid_sparse.errors import ConfigError

SECTION = "hybrid_sparse"  # the key of `--additional-config` that holds the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of a setting, except its name."""

    kind: type[int] | type[float] | type[str]
    default: int | float | str | None  # in effect if the user gives none; None: there is none
    values: str  # the legal values, completing "must be"
    allows: Callable[[Any], bool]
    meaning: str
    unit: str = ""
    policies: tuple[str, ...] = ()  # the only policies that use it; empty: all may
    summaries: tuple[str, ...] = ()  # likewise
    devices: tuple[str, ...] = ()  # likewise
    unless: str = ""  # the setting that replaces this one if it is given


def setting_field(setting: Setting) -> Any:
    """A dataclass field. If only some policies, summaries or devices use it, it is None until known to be used."""
    restricted = setting.policies or setting.summaries or setting.devices
    return field(default=None if restricted else setting.default, metadata={"setting": setting})


def choice_field(
    default: str,
    choices: tuple[str, ...],
    meaning: str,
    policies: tuple[str, ...] = (),
    devices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that holds one of the names in `choices`."""
    return setting_field(
        Setting(
            kind=str,
            default=default,
            values=f"one of {', '.join(choices)}",
            allows=choices.__contains__,
            meaning=meaning,
            policies=policies,
            devices=devices,
        )
    )


def setting_of(entry: Field[Any]) -> Setting:
    """What is known of a field made by `setting_field` or `choice_field`."""
    setting: Setting = entry.metadata["setting"]
    return setting


def refusal(name: str, value: object, rule: str) -> ConfigError:
    """The error of a setting whose value breaks the rule, to raise."""
    return ConfigError(f"{SECTION}.{name}={value!r}: {rule}")


def checked(name: str, value: Any, setting: Setting) -> int | float | str:
    """`value` as the kind of the setting, if it is legal; raises ConfigError otherwise."""
    typed = _typed(value, setting.kind)
    if typed is None:
        kind = {int: "a whole number", float: "a number", str: "text"}[setting.kind]
        raise refusal(name, value, f"must be {kind}, {setting.values}")
    if isinstance(typed, str) and not _is_utf8(typed):
        raise refusal(name, value, "must be text in UTF-8")
    if not setting.allows(typed):
        raise refusal(name, value, f"must be {setting.values}")
    return typed


def _is_utf8(text: str) -> bool:
    """Whether text can be written to logs and metrics: bytes of another encoding on the command line cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _typed(value: Any, kind: type[int] | type[float] | type[str]) -> int | float | str | None:
    """`value` read as `kind`, or None if it is not one. Text counts as the number it spells; a bool is not a number."""
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, str):
        pattern = r"[+-]?[0-9]{1,18}" if kind is int else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
        return kind(value.strip()) if re.fullmatch(pattern, value.strip(), re.ASCII) else None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return None
    try:
        return kind(value)
    except OverflowError:
        return None
