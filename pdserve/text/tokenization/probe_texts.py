"""Texts over which two tokenizers are compared before one of them stands in for the other.

The texts are fixed, and have every class of text that tokenizers treat in a way of its own. They
take some milliseconds to encode. Pure.
"""

from __future__ import annotations

import base64
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PLAIN_TEXTS", "texts_with"]

_PROSE: Final = (
    "The quick brown fox jumps over the lazy dog; it's 12:30, isn't it? I'LL, we've, THEY'RE, "
    "don'T. Größe, naïve café, smørrebrød, Źdźbło, Ελληνικά, Привет, мир! שלום עולם مرحبا "
    "नमस्ते दुनिया สวัสดีชาวโลก "
)
_CODE: Final = (
    'def f(x: int = 0x1F) -> dict[str, float]:\n    """Doc."""\n\treturn {"a": [1, 2.5e-3]}\n\n'
    "if (a<=b && c!=d) { return ~p->q_r[i++] % 7; } // TODO: camelCase snake_case HTTPServer2\r\n"
    "SELECT * FROM t WHERE x >= '2024-01-01';\n<div class=\"a b\">&nbsp;</div>\n$HOME/x_1.so\n"
)
_CJK: Final = (
    "你好，世界！这是一个测试。日本語のテキストとカタカナ、한국어 문장입니다。漢字かな交じり文Ａ１"
)
_EMOJI: Final = "👍🏽 👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 ❤️ 1️⃣ 😀😀 \U0001f9d1\u200d\U0001f680ok"
_NUMBERS: Final = "0 7 42 365 1000 31337 3.14159 -1e-9 1,234,567.89 2024-02-29T23:59Z ٣٤ ४२ Ⅷ ½ x²"
_JSON: Final = (
    '{"id": 1234567890, "tags": ["a", "b\\n", null, true], "nested": {"π": -0.5}}\n[[], {}]'
)
_BASE64: Final = base64.b64encode(bytes(range(256))).decode()
_WHITE: Final = (
    "a b  c   d\n\n e\r\n\r\nf\t\tg \n h\n \ni\u00a0j\u2003k\u2028l\u3000m\x0b\x0cn  \n   "
)
_CONTROL: Final = "\x00\x01\x1b[0m\x7f\x85\u200b\u200d\ufeff\ufffd\uffff\ue000\U0010ffff"
_FORMS: Final = "e\u0301 \u00e9 \u1e9b\u0323 ﬁ ſ ſ's 'ſ K Å İ ı ß ẞ ΐ 각 \u0958 \u2126 ½ ① Ａ"


_CATEGORIES: Final = (
    "\x05\xa0\u1680\u2002\u2028\u2029\xad\u0600\ufeff\u0378\ue000"  # blanks, controls, unassigned
    # punctuation
    "!\xa7\u2026$\xa2\u20b9([\u0f3a)]\u0f3b-\u2013\u30a0_\u203f\uff3f\xab\u2018\xbb\u2019"
    "+\xac\u2212^`\xa8\u02c5\xa6\xa9\u2603"  # symbols
    # letters
    "AZ\xc0\u0178\U0001d400az\xe0\xff\u0138\U0001d41a\u01c5\u1f88\u02b0\u3005\uff70"
    "\xaa\u01c0\u05d0\u4e00\uac00"
    "0\u0663\u0967\U0001d7d8\u2160\u16ee\xb2\xbe\u2460"  # numbers
    "\u0301\u0e31\u3099\u0903\u093e\u20dd\u0488"  # marks
)
"""Some characters of every general category of Unicode."""

PLAIN_TEXTS: Final = (
    "",
    *(_PROSE, _CODE, _CJK, _EMOJI, _NUMBERS, _JSON, _BASE64, _WHITE, _CONTROL, _FORMS),
    *(" " + _PROSE, "\n" + _CODE),
    "".join(f"a{each}b 1{each}2 {each}{each}!({each}\n'{each} " for each in _CATEGORIES),
    "".join(map(chr, range(1, 0x250))),
    "a" * 300 + " " * 300 + "1" * 300 + "\n" * 100 + "=" * 200,
)
"""Texts without added tokens, except by chance."""

_AT_ONCE: Final = 64
"""Added tokens that one text has."""


def texts_with(added: Sequence[str]) -> list[str]:
    """Return texts that contain each added token, in the middle of text and at its edges."""
    rest = iter(added)
    texts = []
    while some := list(islice(rest, _AT_ONCE)):
        texts.append("".join(some))
        texts.append("".join(f"a{each}b {each} 1{each}{each}\n{each}\n" for each in some))
        texts.append(" ".join(each[:-1] + each for each in some))
    return texts
