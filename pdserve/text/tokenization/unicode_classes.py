"""The general category of every character, as the regular expressions of `tokenizers` see it.

`native/src/bpe` looks characters up here. The table has the Unicode version of `tokenizers`, not
that of the interpreter. A character that has no category in it (`UNKNOWN`) is left to `tokenizers`,
so a newer library with newer characters changes nothing.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import cache
from typing import Final
from unicodedata import category

__all__ = ["CLASSES", "UNKNOWN", "WHITE", "character_classes", "normalizable_classes"]

UNKNOWN: Final = 0
"""Unassigned, or a surrogate."""
_ORDER: Final = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "Nd", "N", "P", "S")
CLASSES: Final = {name: place for place, name in enumerate(_ORDER, 1)}
"""Class of a character by its category. `M`, `P`, `S`: all marks, punctuation, symbols; `N`:
numbers that are no digits."""
WHITE: Final = 11
"""White space. Class 12 is all else: controls, formats, private use."""
_LONG: Final = 1000

_RUNS: Final = (
    "c-q~VTd1a08GzrlzV)tet@VHZKA&cfd(S_6ob7C9wlmJb(J~zh1yRhK6eBv21sxzSf}n0hByS`N>Bb<aq-%q)>`I~oQG",
    "r287ZK7;K_On57m+>h`o8_o9yQUlk-B*Qe|_uluJ?RcT^?z-FmkymE=M4=CHvB3@7C*_E6%UmuR#|_u3I13SOKs7tScd",
    "T_Bl?v<ZL!I*}2u?T<h0ZNsiUa2>vauzcujFaWfs;f5T6hj{7zLs&jtd{=Io5ZP+w0S$FUMeaoEseVCfds;50@2U+ygh",
    "F7iMqRt--3nhfE%mgiM!0v$gc>mrmo3VfK0ZCzfPC{XcQ6u)%Gdj<I_DAZ6>EO-LsrFx{T5)ImskcJ{#l`lrO5DFgo^c",
    "rf{cf8L<mh*@7h;*XxSL(X5~3f#Nz#K7G_YgTMT>XEqL+`OOgzhtPJ+`Cmx+c!eRTTqOk9g?XS#~PNA^cn+M-R3gEPW8",
    "b~xRP2gU2XaimUWSU((dFzijhHlsz&l^B9!)<x!`iqEs+^gwJFLBEbfm8hu^oL)3$-C^Ha=i*_#E;ih<V6;G=&rp!DeV",
    "ygB)5Oj2tSgLLzzH$KZngdVvu5WdApxjoM`LqP3GXTP5j`56hAq}T7qR&%fKiO{&|{Q_@0OeF#<qnn@PbK7#gpwGU_Tx",
    "ms7l~zDsZ>Vs_*HsyaGmK-LJojv;8=xoJk8@!WU9>DME))W*jw@lEA;0e$Lmi%{SV?k;08p6e>kARxPHcBs8JW(ettj%",
    "uVli!-+Q5yX#56$BVS&!`3K?#HC9xluNkSk0th!9x&L*Nr%Pl$#Mr7?>nO=uV7M7?H=zb_cm1Jw*Yr*gD#A=w(2ZY`I;",
    "`1MDFqC9n$HkXg9V*P%vP7DLbnR<mgmt3aky|Qg`Qym-%4$pv>?g=?SzodA3#%P*%7np_l0PAY(;UDpx|!l6k0V9D(CX",
    "aRo~)&{%xd5-J79<B}RRQE@~K)gKz87QTayV`pB74O;Zyu92UpE#4nDKOu+y!dC<EgM;+ro#FrRYpj`b-Y|^cXJ(djT0",
    ")$2rATylgF2ey>feI#sPiMI>)9;o_S~cf&RShSt63L0>iJ(lKb?+yP1f<*II;L(6_-~3Lv}F%c@&$j@`FVj!OzcuO_9)",
    "6wP@8_rRX8BnB{h+FKH|$=w{W$NKarD>!#bpO4-uY8gIOwi&$0MFxxZS2D!DU$;=_S7E3=F=S?d$!r(|Tmz?no;@h~!y",
    "%TXp64CL>h%mB(0UxrPL(Cp|SS(g|T*$LI5pl5nxQxEAsA?}3ht!`4H~TSq*$PMFh5z;3a~UE3U+|F3bsRv4kSa{Shnj",
    "5)b#=y8nluHXjn&kRbtyy_-%P(7kGtAfY)n%^9pLw^69h)1PV?HxcS=XIgzt`ljt&Q`9sXkZI@Q`BI3kw$t_x$l=&;O2",
    "z^cnaMPBx5`=+lAOH)H)Kkgxvp{`Y+7+t<tEg6b^yL84Rk`$^!dCBKcHYi43cCu1NvYc)#cczu{myl=DX1SJ?L%Ebko4",
    "itPX6uBB7p>5l!0M;msi7ooUQx=0X?aKa@(z{xZ+n|(V(!0U(+8X!5+TbI`0dNu0li)<u#v{2CEZ+O`|ALq_$2!$q?}H",
    "+$~scLSGw}7ll3y!cgn%43WpNdg7$KZ<QBA-nozr6vo5{cvT5<5)>QgIcGQTc$65QZWwaDZ(Mj1B%hPj(D2|nFrUb^>G",
    "GTlb|4(~;`b@c?Uw_<g{d>av&cnko3$pr%)wv`htKVelzbS08QXqcUTJt}}VO6u<nyhM#lFDkx<@LIa=AAUIu>Z}%zt;",
    "Li+V#y-tOLB>o^bJY@qK60!=*cAIW#>Lft}h$t9@O~v*h~1zcfU#K>ctw2lBAj({X{!U26<FiHHT6h1N<yub|fRoE!_C",
    "kZy?8R43z19$Q_<32HFv53@yzf?5UcPzU6CXBw(i0+`ORgV<SXv(vS{wHnRW+Qrq{Wlha`y^f;tTdjjyhS)#A)KUF$JT",
    "8FL{3`gn^oZ4?!(CAyzlQ>9l``jAd1$VC;Iuw(eZr?@+qcq@A++9SoxpggTiw21=Cfs9=Jc<WL}gAdaPT^zRHta|5Zzo",
    "h5zXZzltD9n0W0;%i&PLQs)x}{2fjD<ewOLkkjpMH;Skl*MP9vi9|c~4($P^e(}AAgql*Kjv&_xNmVSvKN0*a!Ig!&1W",
    "j@s&w^(L!a<c5A@dvBwkjN|zfi=35WCiFFc`zjlLfg><vuWH|*{ujPsa)-j`D1!#FIdOCx3yz5%V*6T97VaK8g{Kcrl1",
    "(UJ>TAxWCib8H1Pwga97Y|lC?nP9<Bzm+)}wT$)6Z{E(^`8MnFosN;GVdNlIBx4IFDyU7>fgo@pJPom?Q42a>)|bYAHi",
    "?Ry{VkVEY~t<Tx0eIQm3rZxk*k*ql1NDWFQwqoHZFJZpWc^%kWsP)jW$c>3Usl`jW)XH6Yo1AxNWbDsKn<8~C-qY908Z",
    "6Gc6}&@hSFu7o^YV;K1aZAu>LWvKSmz+>JmhVpVr@6A|0sp5vSKX(7j5e@S1nmy!a>f(S;z`$sqI@T6IkZ-ZX9LIESoc",
    "z&M+UaHXGY)AZx~2EnLpk{R#Ilw{jKZsW_wDQ-ik^?WS*xl~l7tbFfgK9lG2X<W6qd*Y~*E_Ym-Lv6HkGTJH=0wiS0nL",
    "%P?B?={bAE-%(hA}sDKLj!8JY}+_y>7N{2ZGK(s9oBrzz=FyKl39QctxafsqCl>jaJQtUTvrwIT?e5?K+dabFB4mAn78",
    "OAquSq$Ws&Z2Y(nTeo_0yD(1V<q75o-EvHq)-r!Z19;p9Fy@e^yLvFkK6^=aUEt+vj_S?K9S=Zz2)<<`3Qs!B@ROB~(~",
    "@>}$n&7h4`pP*bE={3X`3&1L446Y^OJn8gsuCES=-um^U^_3*mO$Blmt;e$tFQNj}f7?_I+Yr@ML3-=K>&4Y(?H!=*m_",
    "!{`wSTLTCq0d+wbtzrnk`Ij_4>+VvqbrTJ<X)$vLR!*d90OBrq78{Gt!?p`PGtsjN@Z{B6V}My_?1Tzi|lF|2)W3=ja$",
    "0xaVhMeJY4~`CcA*zw~{rabo^m&{u1HehBsbr`XF!GTxTKwJ1+Clu*aW1dX9{rku2j6MaH&H;;$-^Dq&p(J!zGzl8J=y",
    "w2!LCz1BES#~hLKi?9tvH;p(0{M=YS=iecUTts}wm#CxLks#DZY8R!MG>-Esczi``NL*;p;BJH-^d;D8py|g%jf0B@*-",
    "51tJr%Zxwnb2OSJKrLD`I<yhoPHd!t3^FXDckLAghAIv@`_x9-;gi=+#6Tpz40@dNe`%``w^C<1KXsP2OY*61GkxICSq",
    "z^JWLGt92PCS1YE1EeT}_=ZRInY}$-9tiO~Y4UV^rJ0HKm4=jK7B(x-B<pefl0=%i-}P@*^ED6*_9q%{lEdieekGU17L",
    "{1y>EE)bdpB8{#}jc)QKp`0^dLI5&u8tK)oX7^PM&M32ZU*+box_k-ZGc%xGj%0)69k5?Br`Py_*^vJ&+XdNV`^V%a8l",
    "x2L}{;5vmMmU4^Lj$mXWseahLt|CO+}7KT_E_Te+!^O#sOlqK_WmL&2OUrx{k-iK|F@c~!isFXA=-*R%jd12jxS+akoM",
    "0w1W-`iu|JSBjY0bgMJ5zMoH5Sp$3*OQ{mWXa|QhpTg5ZYsa^+(chp51OE9m+H+UHro}CLTmXDviow<=YH+UqCc7-i9Z",
    "@!5ANbH-+LDx^n8$SFX}gg{Ar}W+=i>?Ci0sf9w%9Cb{~}oTztXFSO3v;|9lxg>wo_R8yDMy",
)
"""Pairs of a class and the number of characters that have it, in order; packed."""


@cache
def character_classes() -> bytes:
    """Return the class of each code point."""
    return b"".join(bytes([kind]) * length for kind, length in _runs())


@cache
def normalizable_classes() -> bytes:
    """Return the same, but characters that this interpreter does not know are `UNKNOWN`: it cannot
    say how they are normalised."""
    classes = bytearray(character_classes())
    begin = 0
    for kind, length in _runs():
        # Long runs are ideographs, syllables and private use, which have no marks among them.
        if kind != UNKNOWN and length < _LONG:
            for place in range(begin, begin + length):
                if category(chr(place)) == "Cn":
                    classes[place] = UNKNOWN
        begin += length
    return bytes(classes)


def _runs() -> list[tuple[int, int]]:
    packed = zlib.decompress(b85decode("".join(_RUNS)))
    runs = []
    at = 0
    while at < len(packed):
        kind, length, shift = packed[at], 0, 0
        at += 1
        more = True
        while more:
            length |= (packed[at] & 0x7F) << shift
            more = packed[at] > 0x7F
            shift += 7
            at += 1
        runs.append((kind, length))
    return runs
