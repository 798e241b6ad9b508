"""Metal as C++ in which clang checks address spaces, with lint/metal_lint.h before it.

Lines keep their numbers. What has no equal in C++ is written otherwise:

    (device half4*)p                     cast_pointer<device half4*>(p)     C++ casts to any space
    half4(0.0f)                          make_vector<half4>(0.0f)
    threadgroup float tile[64];          static threadgroup float tile[64];
    constant bool x [[function_constant(0)]];     extern constant bool x;
    0.5h                                 half(0.5f)
    every other [[attribute]]            left out

and two things are put in: behind a kernel's threadgroup variables an assertion about their size; at
the beginning of a struct the constructors by which Metal copies one out of memory, as C++ finds no
copy of what lies in another address space."""

import re
from collections.abc import Sequence

from .declarations import SPACES, declarations, is_threadgroup_variable, threadgroup_names
from .tokens import SourceError, Token, is_attribute, matching, matching_angle, text_of

THREADGROUP_BYTES = 32 * 1024  # the most that a threadgroup has
VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|float|bfloat)[234]")


def rewritten(tokens: Sequence[Token]) -> str:
    return _Rewrite(tokens).text(0, len(tokens))


class _Rewrite:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.put_before: dict[int, str] = {}  # by index of a token
        self.put_behind: dict[int, str] = {}
        for declaration in declarations(tokens):
            if declaration.kind == "variable" and "function_constant" in declaration.marks:
                self.put_before[declaration.start] = "extern "
            if declaration.body and declaration.kind == "function":
                self._function(*declaration.body, declaration.is_kernel)
            elif declaration.body and declaration.head[0].text == "struct":
                copies = f" METAL_LINT_COPIES({declaration.name.text}) "
                self.put_before[declaration.body[0]] = copies

    def _function(self, start: int, stop: int, is_kernel: bool) -> None:
        names, last = [], start
        for i in range(start, stop):
            if is_threadgroup_variable(self.tokens, i):
                self.put_before[i] = "static "
                names += threadgroup_names(self.tokens, i)
                last = i
        if names and is_kernel:
            end = next(i for i in range(last, stop) if self.tokens[i].text == ";")
            size = " + ".join(f"sizeof({name})" for name in names)
            self.put_behind[end] = (
                f' static_assert({size} <= {THREADGROUP_BYTES}, "threadgroup variables take more '
                f'than {THREADGROUP_BYTES} bytes");'
            )

    def text(self, start: int, stop: int) -> str:
        out = []
        i = start
        while i < stop:
            token = self.tokens[i]
            out.append(token.before + self.put_before.get(i, ""))
            if self.is_cast(i):
                close = matching(self.tokens, i)
                end = self.operand_end(close + 1)
                kind, operand = text_of(self.tokens[i + 1 : close]), self.text(close + 1, end)
                if kind.endswith("&"):
                    out.append(f"*metal::cast_pointer<{kind[:-1]}*>(&({operand}))")
                else:
                    out.append(f"metal::cast_pointer<{kind}>({operand})")
                i = end
            elif (end := self.constructed_type_end(i)) > i:
                out.append(f"metal::make_vector<{text_of(self.tokens[i:end])}>")
                i = end
            elif i + 1 < stop and is_attribute(self.tokens, i):
                end = matching(self.tokens, i) + 1
                out.append("".join(t.before for t in self.tokens[i + 1 : end]))
                i = end
            else:
                half = token.kind == "number" and token.text[-1] in "hH"
                out.append(f"half({token.text[:-1]}f)" if half else token.text)
                out.append(self.put_behind.get(i, ""))
                i += 1
        return "".join(out)

    def constructed_type_end(self, i: int) -> int:
        """Where the vector type that begins at `i` ends, if its constructor is called; else `i`."""
        if self.tokens[i].kind != "word":
            return i
        end = i + 1
        if self.tokens[i].text == "vec" and self.tokens[end].text == "<":
            end = matching_angle(self.tokens, end) + 1
        elif not VECTOR.fullmatch(self.tokens[i].text):
            return i
        return end if self.tokens[end].text == "(" else i

    def is_cast(self, i: int) -> bool:
        """Whether `(device T*)` or `(device T&)`, with an operand behind it, begins at `i`."""
        if self.tokens[i].text != "(" or (
            self.tokens[i - 1].kind == "word" and self.tokens[i - 1].text != "return"
        ):
            return False
        close = matching(self.tokens, i)
        inside = [token.text for token in self.tokens[i + 1 : close]]
        operand = self.tokens[close + 1]
        return (
            len(inside) > 1
            and inside[-1] in ("*", "&")
            and bool(SPACES & set(inside))
            and (operand.kind in ("word", "number") or operand.text in ("(", "&", "*"))
        )

    def operand_end(self, i: int) -> int:
        """Where the operand of a cast that begins at `i` ends: a primary and what applies to it."""
        while self.tokens[i].text in ("&", "*", "-", "+", "~", "!", "++", "--"):
            i += 1
        if self.is_cast(i):
            return self.operand_end(matching(self.tokens, i) + 1)
        if self.tokens[i].text == "(":
            i = matching(self.tokens, i) + 1
        else:
            i += 1
            while self.tokens[i].text == "::":
                i += 2
            i = self.template_arguments_end(i)
        while True:
            text = self.tokens[i].text
            if text in ("(", "["):
                i = matching(self.tokens, i) + 1
            elif text in (".", "->"):
                i += 2
            elif text in ("++", "--"):
                i += 1
            else:
                return i

    def template_arguments_end(self, i: int) -> int:
        """Behind <…> where it is followed by a call; else `i`, as < compares."""
        if self.tokens[i].text == "<":
            try:
                end = matching_angle(self.tokens, i) + 1
            except SourceError:
                return i
            if self.tokens[end].text == "(":
                return end
        return i
