# SPDX-License-Identifier: AGPL-3.0-only
"""CUDA source as text: blank out comments and directives, and find the headers of `extern "C"` kernels.

This reads declarations, it does not compile: what a macro makes stays unseen, and what is ambiguous is left out. The
compiled PTX has the last word (see `signature.reconcile`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DIRECTIVE = "\x01"
"""Stands where a preprocessor directive was, so that a parameter list with a condition inside is noticed."""

_LEXEME = re.compile(
    r"""//[^\n]*|/\*.*?\*/                       # comments
      |R"(?P<delim>[^()\s\\]{0,16})\(.*?\)(?P=delim)"  # raw strings
      |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'        # strings and characters
    """,
    re.DOTALL | re.VERBOSE,
)
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|[A-Za-z_]\w*|::|\d[\w.\']*|[^\s\w]')
_ALIAS_TYPEDEF = re.compile(r"\btypedef\s+((?:\w+\s+)*\w+)\s+(\w+)\s*;")
_ALIAS_USING = re.compile(r"\busing\s+(\w+)\s*=\s*((?:\w+\s+)*\w+)\s*;")
_ALIAS_DEFINE = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+((?:[A-Za-z_]\w*[ \t]+)*[A-Za-z_]\w*)[ \t]*$", re.MULTILINE
)
# Annotations that take parentheses, which are no parameter list.
_ANNOTATIONS = frozenset(
    {
        "__launch_bounds__",
        "__cluster_dims__",
        "__maxnreg__",
        "__block_size__",
        "__attribute__",
        "__declspec__",
        "alignas",
    }
)


_CONDITION = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|elifdef|elifndef|else|endif)\b[ \t]*(.*)")
_EMULATED = "SPARK_EMULATED"


@dataclass(frozen=True, slots=True)
class KernelText:
    """An `extern "C" __global__` definition: its name and one token list a parameter."""

    function: str
    params: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class SourceText:
    """What was read of one source: kernel headers by name, the names that were ambiguous, and type aliases."""

    kernels: dict[str, KernelText] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)


def emulated_text(text: str) -> str:
    """Text without comments as a build with SPARK_EMULATED has it: what stands under `#ifndef SPARK_EMULATED`, or
    behind the `#else` of `#ifdef SPARK_EMULATED`, is gone. Other conditions are not decided: their branches stay."""
    lines: list[str] = []
    kept: list[bool | None] = []  # of each open condition whether its branch stays; None: not decided
    for line in text.splitlines(keepends=True):
        if (found := _CONDITION.match(line)) is None:
            lines.append(line if False not in kept else "\n")
            continue
        word, about = found[1], found[2].strip()
        if word in ("ifdef", "ifndef", "if"):
            kept.append((word == "ifdef") if about == _EMULATED and word != "if" else None)
        elif word == "endif":
            if kept:
                kept.pop()
        elif kept and kept[-1] is not None:
            kept[-1] = not kept[-1] if word == "else" else None
        lines.append(line)
    return "".join(lines)


def without_comments(text: str) -> str:
    """The text with spliced lines joined and comments blanked; strings stay as they are."""
    text = re.sub(r"\\\r?\n", " ", text)

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith(("//", "/*")):
            return " " + "\n" * found.count("\n")
        if found.startswith("R"):
            return '""'
        return found

    return _LEXEME.sub(blank, text)


def _without_directives(text: str) -> str:
    """Directive lines become DIRECTIVE; what `#if 0` hides goes altogether."""
    kept: list[str] = []
    hidden = 0  # depth of conditionals inside an #if 0, itself included
    for line in text.split("\n"):
        stripped = line.lstrip()
        if not stripped.startswith("#"):
            kept.append("" if hidden else line)
            continue
        word = re.match(r"#\s*(\w*)\s*(.*)", stripped)
        name, rest = (word.group(1), word.group(2).strip()) if word else ("", "")
        if hidden:
            if name in ("if", "ifdef", "ifndef"):
                hidden += 1
            elif name == "endif" or (hidden == 1 and name in ("else", "elif")):
                hidden -= 1
        elif name == "if" and rest in ("0", "false"):
            hidden = 1
        kept.append(DIRECTIVE)
    return "\n".join(kept)


def _split_params(tokens: list[str]) -> tuple[tuple[str, ...], ...] | None:
    """Parameters between parentheses, split at commas outside brackets; None where brackets do not pair."""
    params: list[tuple[str, ...]] = []
    current: list[str] = []
    depth = 0
    for token in tokens:
        if token == "," and depth == 0:
            params.append(tuple(current))
            current = []
            continue
        depth += token in "([{<" and len(token) == 1
        depth -= token in ")]}>" and len(token) == 1
        if depth < 0:
            return None
        current.append(token)
    if depth:
        return None
    params.append(tuple(current))
    if params in ([()], [("void",)]):
        return ()
    return None if () in params else tuple(params)


def _read_header(found: SourceText, tokens: list[str]) -> None:
    """Add the kernel that the tokens before a body declare, or its name to the ambiguous ones."""
    # What stands before the declaration, say a macro call without a semicolon, is none of it.
    first = next(index for index, token in enumerate(tokens) if token in ("extern", "__global__"))
    groups = _parentheses(tokens[first:])
    if len(groups) == 1 and "void" in tokens:
        name, inner = groups[0]
        params = None if DIRECTIVE in inner else _split_params(inner)
        known = found.kernels.get(name)
        if params is not None and (known is None or known.params == params):
            found.kernels[name] = KernelText(name, params)
            return
    # Made by a macro, or two branches of a condition: which one was compiled, only the PTX tells.
    found.ambiguous.update(name for name, _ in groups)


def _parentheses(tokens: list[str]) -> list[tuple[str, list[str]]]:
    """Each word with a parenthesis after it that is no annotation, and what the parenthesis holds."""
    groups: list[tuple[str, list[str]]] = []
    index = 0
    while index < len(tokens):
        if tokens[index] != "(":
            index += 1
            continue
        start, depth = index, 0
        while index < len(tokens):
            depth += tokens[index] == "("
            depth -= tokens[index] == ")"
            index += 1
            if depth == 0:
                break
        before = tokens[start - 1] if start else ""
        if before not in _ANNOTATIONS:
            groups.append((before, tokens[start + 1 : index - 1]))
    return groups


def read_source(text: str) -> SourceText:
    """Every `extern "C" __global__` definition that can be read, also in `extern "C" { }` blocks and namespaces."""
    found = SourceText()
    plain = without_comments(text)
    for pattern, name_first in ((_ALIAS_TYPEDEF, False), (_ALIAS_USING, True), (_ALIAS_DEFINE, True)):
        for first, second in pattern.findall(plain):
            name, target = (first, second) if name_first else (second, first)
            # An alias with two meanings (branches of a condition) has none here: "" is no type.
            target = " ".join(target.split())
            found.aliases[name] = target if found.aliases.get(name, target) == target else ""
    tokens = _TOKEN.findall(_without_directives(plain))

    linkage: list[bool] = []  # one entry an open extern or namespace block: is it "C"?
    declaration: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token == ";":
            declaration = []
        elif token == "}":
            if linkage:
                linkage.pop()
            declaration = []
        elif token == "{":
            words = [word for word in declaration if word != DIRECTIVE]
            outer_c = bool(linkage) and linkage[-1]
            if words[-2:] in (["extern", '"C"'], ["extern", '"C++"']):
                linkage.append(words[-1] == '"C"')
            elif "namespace" in words and "(" not in words:
                linkage.append(outer_c)
            else:
                own_c = any(words[at : at + 2] == ["extern", '"C"'] for at in range(len(words)))
                if "__global__" in words and (own_c or outer_c) and "template" not in words:
                    _read_header(found, declaration)
                depth = 1
                while index < len(tokens) and depth:
                    depth += tokens[index] == "{"
                    depth -= tokens[index] == "}"
                    index += 1
            declaration = []
        else:
            declaration.append(token)
    for name in found.ambiguous:
        found.kernels.pop(name, None)
    return found
