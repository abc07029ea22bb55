"""Tests of rampup.contrib.check.shell.script: shell scripts are read as bash would expand them,
and never executed.
"""

import re
import subprocess
from pathlib import Path

import pytest
from helpers.bash import commands_by_bash, needs_bash, runs, with_arguments
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rampup.contrib.check.shell.flow import MAX_REPEATS
from rampup.contrib.check.shell.grammar import parse
from rampup.contrib.check.shell.script import MAX_SCRIPTS, read_commands
from rampup.contrib.check.shell.values import (
    explain_unknown,
    show_unknown,
    unknown_names,
)
from rampup.errors import ConfigError

NESTED = re.compile(r"\brun\b")
SCRIPTS = {
    "assignments": (
        'A=1; B=$A$A\nC="x $B"\nexport D="$C" E=5\nrun $A ${B} $C "$C" \'$C\' $D$E'
    ),
    "prefixed assignments": "A=1\nA=2 B=3 run $A",
    "continuation": "run --a 1 \\\n  --b 2 \\\n  # the end\nrun --c",
    "comments": "# no\nrun a#b '#c' # d\nrun e;# f\nrun g",
    "arrays": (
        'A=(--a 1 "b c" ${UNUSED:-})\nA+=(--d 2\n  # inside\n  --e "3")\nrun "${A[@]}"'
        ' ${#A[@]} ${A[1]} "${A[*]}" "x${A[@]}y" ${A[-1]}'
    ),
    "options in a text": 'ARGS="--a 1 \\\n --b 2"\nARGS+=" --c 3"\nrun $ARGS "$ARGS"',
    "arguments left out": 'run a "$@" b $* c',
    "defaults": (
        'run ${A:-1} ${B-2} ${C:=3} $C ${C:+4} ${D:+5}. ${1:-8} ${2-9} "${E:-a b}"'
        " ${E:-a b}"
    ),
    "nested defaults": "N=4\nrun ${A:-${B:-$((N * 2))}} ${N:-${X}}",
    "arithmetic": (
        "A=7\nB=2\nrun $((A / B)) $((-A / B)) $((A % B)) $((A*(B+1))) $((A>B))"
        " $((A != 7)) $((0)) $(( - A + B )); if ((A >= 7)); then run $A; fi"
    ),
    "conditions": (
        'N=2\nif [ $N -gt 1 ] && [[ "$N" == 2* ]]; then A=1; elif true; then A=2; else'
        " A=3; fi\nrun $A"
    ),
    "else": (
        'if [ -n "$NOT_SET" ]; then A=1; else A=2; fi\n[[ -z $NOT_SET ]] && B=1 ||'
        " B=2\n[ ! 3 -lt 2 ] && C=1\nrun $A $B $C"
    ),
    "strings compared": (
        'A="x y"\nif [[ $A != "x y" || ( $A == x* && 1 -eq 1 ) ]]; then run 1; else run'
        " 2; fi"
    ),
    "empty without quotes": (
        "if [ $NOT_SET = 7B ]; then L=1; elif [ $NOT_SET -gt 3 ]; then L=2; else L=3;"
        " fi\nrun $L"
    ),
    "case": (
        "for m in 7B 13B other; do case $m in 7B|8B) L=32;; 13*) L=40 ;; *) L=0;; esac;"
        " run $m $L; done"
    ),
    "loops": ("for i in 1 2 'a b'; do for j in 1 2; do run $i \"$i\" $j; done; done"),
    "functions": (
        'f() { local x=$1; shift; run "$x" "$@" $#; return 0; run never; }\nfunction g'
        ' { f 1 "$1"; }\ng "a b"'
    ),
    "usage": "if [ $# -gt 5 ]; then echo usage; exit 1; fi\nrun a",
    "pipes": (
        "run a 2>&1 | run b > /dev/null &\nrun c >> /dev/null 2>/dev/null && run d ||"
        " run e\n(run f; X=1)\n{ run g${X:-}; }"
    ),
    "here-document": (
        "N=3\nrun <<EOF\n$N a b\nEOF\nrun a <<'X' > /dev/null\n\t$N\nX\nrun b <<<"
        ' "$N"'
    ),
    "quoted commands": (
        "export N=3\nrun bash -c \"run a $N \\$N\"\nrun bash -c 'run b $N.'"
    ),
    "variables of a shell in quotes": (
        "A=1\nexport B=2\nC=3\nexport C\ndeclare -x D=4\nE=5 bash -c 'run a $A. $B $C"
        ' $D $E\'\nbash -c "run b $A \\$A. $E."'
    ),
    "all variables exported": "A=1\nset -a\nB=2\nset +a\nbash -c 'run $A. $B'",
    "eval": "C='run a \"b c\"'\neval $C",
    "set": 'set -euo pipefail\nset -- 1 "2 3"\nrun "$@" $2',
    "quotes": 'run \'a\'"b"c \\$x "\\"q\\"" "" \'\'',
    "exit": "run a\nexit 0\nrun b",
    "carriage returns in quotes": "run 'a\tb' \"c\td\"",
}

LONG = (
    'N= V= REST=(); while [[ $# -gt 0 ]]; do case "$1" in --n) N="$2"; shift 2;; --n=*)'
    ' N="${1#*=}"; shift;; -v|--verbose) V=1; shift;; --) shift; break;; *)'
    ' REST+=("$1"); shift;; esac; done\nrun "$N" "$V" "${REST[@]}" "$@"'
)
GETOPTS = (
    'N=256 M=1 V=0 E= U=; while getopts ":n:m:vh" o; do case $o in n) N=$OPTARG;; m)'
    " M=$OPTARG;; v) ((V++));; :) E=$OPTARG;; \\?) U=$OPTARG;; esac; done; shift"
    ' $((OPTIND - 1))\nrun $N $M $V "$E" "$U" "$@" $OPTIND'
)
# Scripts with options of their own, loops and small programs, and their arguments.
WITH_ARGUMENTS = {
    "no options": (LONG, ""),
    "a value that is missing": ('N=1; while [ $# -gt 0 ]; do case $1 in --n) N=$2; shift; shift;; esac; done; run "$N" $#', "--n"),
    "until there is no argument": ('until [ -z "$1" ]; do case $1 in -b) B=$2; shift;; -n) N=$2; shift;; esac; shift; done; run $B $N', "-b 3 -n 4"),
    "a word as a test": ('A=; while [ "$1" ]; do A="$A.$1"; shift; done; run $A', "1 2 3"),
    "not empty": ('while [ "$1" != "" ]; do case "$1" in a) A=1;; b) A=$((A + 1));; esac; shift; done; run $A', "a b b"),
    "n of them": ('L=; while [ -n "$1" ]; do L="$1 $L"; shift; done; run $L', "x y z"),
    "arithmetic test": ("S=0; while (( $# )); do S=$((S + $1)); shift; done; run $S", "1 2 3 4"),
    "arithmetic count": ("S=0; while (($# > 1)); do S=$((S + $1)); shift 2; done; run $S $#", "1 2 3 4 5"),
    "options in a function": ('parse() { while [ $# -gt 0 ]; do case $1 in -n) N=$2; shift 2;; *) shift;; esac; done; }; parse "$@" -n 9; run $N $#', "-n 4 x"),
    "nested case": ('while [ $# -gt 0 ]; do case $1 in -m) case $2 in 7B) L=32;; 70B) L=80;; esac; shift;; esac; shift; done; run $L', "-m 7B -m 70B"),
    "over an array": ('A=(1 "2 3" 4); for a in "${A[@]}"; do B+=("x$a"); done; run "${B[@]}" ${#B[@]}', ""),
    "while with a counter": ("N=0; i=0; while [ $i -lt 70 ]; do N=$((N + i)); i=$((i+1)); done; run $N $i", ""),
    "break in an if": ("for n in 1 2 4 8; do if [ $n -gt 2 ]; then break; else N=$n; fi; done; run $n $N", ""),
    "a subscript in a subscript": ("P=(a b c); R=7; run ${P[$(( R % ${#P[*]} ))]} ${P[${#P[@]} - 1]}", ""),
    "return of a status": ('big() { if [ $1 -gt 4 ]; then return 0; fi; return 1; }; if big 8; then N=8; fi; if ! big 2; then M=2; fi; big 3 || K=3; run $N $M $K', ""),
    "return from a loop": ('first() { for x in "$@"; do if [[ $x == b* ]]; then R=$x; return; fi; done; R=none; }; first a bc bd; run $R; first a; run $R', ""),
    "shift too far": ('shift 5; run "$@"; shift 2; run "$@" $#', "1 2 3"),
    "a document for bash": ("N=4\nbash <<EOF\nrun $N\nEOF\nbash -s <<'EOF'\nN=3\nrun $N.\nEOF", ""),
    "a pipe is a shell of its own": ('N=1; echo 2 | { N=2; run in $N; }; run $N; (N=3; run $N); run $N', ""),
    "exported in a loop": ('while [ $# -gt 0 ]; do export "$1"; shift; done; bash -c \'run $A $B\'', "A=1 B=2"),
    "set in a loop": ('for s in "1 2" "3 4"; do set -- $s; run $1 $2 $#; done', "x"),
    "local": ("f() { local N=3 M; M=2; K=$N; g; run $N $M; }; g() { N=9; }; N=1 M=1; f; run $N $M $K; h() { declare N=5; }; h; run $N", ""),
}  # fmt: skip
# What is not read: its values are unknown, or the script is refused.
UNREAD = {
    "a document in a substitution": ("N=4\nCMD=$(cat <<'EOS'\nset -e  # it's (here\nN=5\nrun a $N\nEOS\n)\nbash -lc \"${CMD}\"\nC2=\"$(cat <<EOF\nrun b $N\nEOF\n)\"\nbash -c \"$C2\"", ""),
    "long options": (LONG, "--n 4 a -v b --n=8 -- --n c"),
    "pattern of a word": ('while [[ "$1" == --* ]]; do k=${1#--}; declare "$k=$2"; shift 2; done; run "$lr" "$bs" "$@"', "--lr 2 --bs 8 rest"),
    "key=value words": ('for a in "$@"; do k=${a%%=*}; v=${a#*=}; case $k in n) N=$v;; b) B=$v;; esac; done; run $N $B', "n=2 b=16 n=3"),
    "for without in": ('for a; do case $a in --n=*) N="${a#*=}"; shift;; esac; done; run $N "$@"', "--n=2 x --n=4"),
    "ends of a text": ("P=/a/b.c.d.b\nrun ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P%x} ${P#b}", ""),
    "a document without an end": ("N=2\nbash <<EOF\nrun $N", ""),
    "here-strings": ('N=2\nbash <<< "run a $N"\nbash <<< \'run b\'', ""),
    "indented document": ("N=2\nbash <<-EOF\n\trun $N\n\tEOF\nrun 3", ""),
    "counted": ("S=0; for ((i = 0; i < 5; i++)); do if ((i % 2)); then continue; fi; S=$((S + i)); done; run $S $i", ""),
    "counted down": ("for ((i=8; i; i/=2)); do A+=($i); done; run ${A[@]}", ""),
    "over the keys of an array": ('S=0 A=(5 6 7); for i in "${!A[@]}"; do S=$((S + i * A[i])); done; run $S', ""),
    "two arrays": ('N=(1 2 4); B=(8 16 32); for ((i=0; i<${#N[@]}; i++)); do run ${N[$i]} ${B[i]}; done', ""),
    "until with a counter": ("i=1; until ((i >= 100)); do ((i *= 2)); done; run $i", ""),
    "long list": ("for i in {1..100}; do L=$i; done; for i in {3..1}; do run $i $L; done", ""),
    "separators": ('L=1,2,3; IFS=,; for x in $L; do run $x; done; A=(7 8); run "${A[*]}"; set -- $L; run $2; IFS=\' \'', ""),
    "glob patterns of a text": ("D=0,1,2,3; C=${D//[^,]/}; run $((${#C} + 1)) ${D/[0-9]/x} ${D//?,/}; A=({1..4}); run \"${A[@]:1:2}\" ${A[@]:2}; A[4]=9; run ${#A[@]}", ""),
    "read of an array": ('D=0,1,2,3; IFS=\',\' read -ra G <<< "$D"; run ${#G[@]} ${G[3]}; read -a H <<< "x y"; run ${H[@]}', ""),
    "read of a document": ("N=4\nread -r -d '' CMD <<EOF\nrun --n $N \\\n  --m 2\nEOF\nbash -c \"${CMD}\"", ""),
    "cut": ("A=v5p-128; run $(echo $A | cut -d- -f2) $(echo \"$A\" | cut -d '-' -f 1)", ""),
    "mappings": ("declare -A M; M[a]=1; M[b]=2; run ${#M[@]} ${M[b]}; declare -A E=([x]=4); E[y]=5; run ${#E[@]}", ""),
    "assigned item": ("A=(1 2 3)\nA[1]=9\nrun ${A[@]} ${A[-1]}", ""),
    "changed in a test": ("N=2; (( N *= 4 )); run $N $((A = B = 5)) $A $B; if ((N >= 8 && N <= 8)); then run $N; fi; ((++N)); run $N", ""),
    "choice in arithmetic": ("A=7; run $(( (A>3) ? 10 : 20 )) $((!A)) $((A>3 || A<1))", ""),
    "letters": ("P=ab; run ${#P} ${P^^} ${P:1}; run ${P/#a/x}", ""),
    "number of devices": ("export D=0,1,2,3\nrun $(echo $D | tr ',' '\\n' | wc -l)", ""),
    "replaced": ("P=/a/b.c.d.b\nrun ${P/b/X} ${P//b.c/y}", ""),
    "a part of an array": ('A=(1 2 3)\nrun "${A[@]:2}"\nrun ${A[@]%2}\nB=("${A[@]:1}" x)\nrun ${B[1]} ${#B[@]}', ""),
    "keys of an array": ('A=(5 6)\nB=("${!A[@]}" x)\nrun ${B[1]} ${#B[@]}', ""),
    "fields": ("D=0,1; run $(echo $D | awk -F, '{print NF}') $(cat <<< \"$D\")", ""),
    "quoted escapes": ("run $'t\\tb'", ""),
    "regular expression": ('while [[ $1 =~ ^-[a-z]+$ ]]; do A+=("${1:1}"); shift; done; run "${A[@]}" "$@"', "-a -bc D"),
    "index of an argument": ('for ((i=1; i<=$#; i++)); do if [ "${!i}" = --n ]; then j=$((i + 1)); N=${!j}; fi; done; run $N', "a --n 7 b"),
    "getopts": (GETOPTS, "-n 4 -m8 -vv rest"),
    "getopts of nothing": (GETOPTS, ""),
    "getopts that ends": (GETOPTS, "-v -- -n 4"),
    "getopts that stops": (GETOPTS, "-v x -n 4"),
    "getopts in a cluster": (GETOPTS, "-vvn 12 -"),
    "getopts without a value": (GETOPTS, "-m 3 -n"),
    "getopts of another": (GETOPTS, "-z -x4 -n 2"),
    "getopts aloud": ('X=; while getopts "n:a" o; do case $o in n) N=$OPTARG;; ?) X=$o;; esac; done; run "$N" "$X" "$OPTARG"', "-n 3 -q -n"),
    "getopts of other words": ('N=; while getopts n: o -n 4 -n 5; do N+=$OPTARG; done; run $N', ""),
    "getopts twice": ('f() { local OPTIND=1; while getopts n: o "$@"; do N=$OPTARG; done; }; f -n 2; run $N; OPTIND=1; f -n 3; run $N', ""),
    "counted by two": ("for ((i=0, j=10; i < j; i+=2, j--)); do run $i $j; done", ""),
    "let in a loop": ('i=0; while :; do let i++; [ $i -ge 6 ] && break; done; run $i', ""),
    "break of two loops": ("for i in 1 2 3; do for j in 1 2 3; do if [ $i$j = 22 ]; then break 2; fi; run $i $j; done; done; run $i $j", ""),
    "continue of two loops": ("for i in 1 2; do for j in 1 2 3; do [ $j = 2 ] && continue 2; run $i $j; done; run never; done", ""),
    "seq": ("for i in $(seq 2 3 9) $(seq 2); do run $i; done; run $(seq 3 -1 1)", ""),
    "expr": (r"N=8; GAS=$(expr 128 / $N); run $GAS $(expr $GAS \* $N - 3) $(expr 7 % 4) `expr 2 + 3 \* 4`", ""),
    "read of a list": ('IFS=, read -r A B C <<< "1,2,3,4"; run $A $B $C; read -r X Y <<< "  a   b c "; run "$X" "$Y"', ""),
    "lines of a text": ("mapfile -t A <<< $'a b\\nc'\nrun \"${A[@]}\" ${#A[@]}", ""),
    "printf": ("run $(printf '%d-%s' 4 x) $(printf '%03d' 7) \"$(printf 'a b\\n')\" `echo 1 2`", ""),
    "grep of a known text": ('M=llama-70b; if echo "$M" | grep -q 70b; then T=8; else T=4; fi; if echo $M | grep -qi LLAMA; then U=1; fi; run $T $U', ""),
    "regular expressions": ('A=v5p-128; if [[ $A =~ ^v[0-9]p-([0-9]+)$ ]]; then B=1; fi; if [[ 12 =~ ^[[:digit:]]+$ && ! x =~ ^[0-9] ]]; then C=1; fi; run $B $C', ""),
    "variables by name": ('n=0; for v in A B; do eval "$v=$((++n))"; done; run $A $B; for v in A B; do run ${!v}; done', ""),
    "slices": ('A=({1..4}); run "${A[@]:1}" "${A[@]: -2}" ${#A[@]} "${A[@]/#/--}" "${A[@]/%/x}"; A[7]=9; run ${#A[@]} "${A[@]:1:2}"; printf -v P "%02d" 7; B=ab; run $P ${B^} ${B^^}', ""),
    "patterns": ("D=0,1,2,3; C=${D//[^,]/}; run $((${#C} + 1)) ${D/[0-9]/x} ${D//?,/} ${D/#0/a} ${D/%3/b} ${D/,*/} ${D/#3/c}", ""),
    "defaults after options": ('while getopts n: o; do case $o in n) n=$OPTARG;; esac; done; N=${n:-8}; : ${B:=$((N * 2))}; run $N $B', "-n 2"),
    "break of too many": ("for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break 7; run $j; done; run never; done; run $i $j", ""),
    "powers and bits": ("N=3; run $((N ** 2)) $((N << 1)) $((N | 4)) $((1, 2)) $((010)) $((0x10)) $[N+1]; ((N <<= 1)); run $N; (( N > 9 && (N = 5) )); run $N", ""),
    "let": ("N=2; let M=N*2; run $M", ""),
    "indirect": ("A=B\nB=7\nrun ${!A}", ""),
    "end of a text": ("P=abc; run ${P: -1} ${P:0:-1} ${P^} ${P/#a/x}", ""),
    "falls through": ("case a in a) N=1;& b) N=2;; esac; run $N", ""),
    "chosen by hand": ("select N in 1 2; do break; done; run $N", ""),
    "extended patterns": ("case ab in @(ab|cd)) N=1;; *) N=2;; esac; run $N", ""),
    "printed variable": ("printf -v P %02d 7; run $P", ""),
    "exported functions": ("run() { :; }; g() { run x; }; export -f g; bash -c g", ""),
    "escapes": ("run $(echo -e 'a\\tb') $'a\\x41'", ""),
    "items": ("A=(1 2); A[7]=9; A[1]+=x; run ${#A[@]} ${A[1]}; unset 'A[0]'; run ${A[@]}", ""),
}  # fmt: skip
# Scripts that start others: the first, and the others beside it.
CHILD = 'run "$@" $# ${1:-} $A. $B. $C.\n'
FAMILIES = {
    "arguments": ('bash child.sh 1 "2 3"\nsh ./child.sh a b', {}),
    "own folder": ('D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nbash "$D/child.sh" 1\nbash $(dirname "$0")/child.sh 2', {}),
    "path of itself": (
        'P=$(realpath "$0")\nbash "$(dirname "$P")/child.sh" $(basename $0 .sh)\nD=`dirname $(readlink -f "$0")`; bash $D/sub/../child.sh',
        {"sub/x.sh": ""}),
    "working directory": (
        'cd sub\nbash x.sh 1\n(cd .. && bash child.sh)\nbash $PWD/x.sh 2; cd "$(dirname "$0")"; bash child.sh',
        {"sub/x.sh": 'run x "$@"\nbash y.sh "$1"', "sub/y.sh": 'run y "$@"'}),
    "exported": ("A=1\nexport B=2\nC=3 bash child.sh\nenv A=4 bash child.sh x\nbash child.sh y", {}),
    "exports do not come back": (
        "bash x.sh\nrun $A. $B.\nA=1; export B=2; . ./x.sh\nrun $A. $B.", {"x.sh": "run $A. $B.\nA=5\nexport B=6"}),
    "sourced": (
        'A=1\nsource ./x.sh\nrun "$A" $N $#; f 1\n. ./x.sh 7\nrun $# $N',
        {"x.sh": 'run "$A" $#\nA="2 3"; N=${1:-}.\nf() { run f "$@"; }\nreturn\nrun never'}),
    "sourced with arguments": (
        "set -- 8 9\n. ./x.sh 7\nrun $#\n. ./x.sh\nrun $#", {"x.sh": 'run "$@"\nif [ $1 = 8 ]; then set -- 1 2 3; fi'}),
    "sourced exit": ("run 1\nsource ./x.sh\nrun never", {"x.sh": "run 2\nexit 0"}),
    "sourced break": (
        "for i in 1 2 3; do run $i; . ./x.sh 7; run after $1; done; run $i $#\nbreak\nf() { . ./x.sh; run f; }\n"
        "for i in 1 2 3 4; do f; run $i; done; run $i",
        {"x.sh": "if [ $i = 1 ]; then continue; fi; break"}),
    "sourced elsewhere": (
        'source sub/x.sh\nrun "$N"',
        {"sub/x.sh": 'source "$(dirname "${BASH_SOURCE[0]}")/y.sh"',
         "sub/y.sh": "N=4\nif [[ ${BASH_SOURCE[0]} == $0 ]]; then run main; fi"}),
    "exec": ('if [ -n "$A" ]; then exec bash child.sh no; fi\nexec bash child.sh 1\nrun never', {}),
    "exit of another": ("bash x.sh\nrun a", {"x.sh": "run b\nexit 0\nrun never"}),
    "shift and set": (
        'bash x.sh 1 2 "3 4"',
        {"x.sh": 'N=$1; shift\nrun $N "$@"\nset -- "$@" 5\nbash child.sh "$@"\nf() { shift; run "$@" $#; }\nf a b'}),
    "by Slurm": ("export B=1\nsbatch -J name child.sh 1\nsrun --mpi=pmix bash child.sh 2", {}),
    "in quotes": ("export B=1\nbash -c 'bash child.sh $1 $0 a' zero one", {}),
    "itself": ('case "${1:-}" in "") bash "$0" 1;; 1) A=2 bash $0 2 x;; *) bash child.sh "$@";; esac', {}),
    "itself by its environment": ('export B\nif [ -z "$B" ]; then B=1 bash $0; else run $B; fi', {}),
    "loop": ("for n in 1 2; do A=$n bash child.sh $n; done", {}),
    "without suffix": ("bash x 1", {"x": 'run "$@"'}),
}  # fmt: skip


@needs_bash
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_never_wrong(name, tmp_path):
    """A construct that is not read makes its values unknown, or the script is refused:
    what is known is what bash runs.
    """
    text, arguments = UNREAD[name]
    (tmp_path / "script.sh").write_text(text)
    wanted = runs(commands_by_bash(text, tmp_path, arguments.split()))
    try:
        started = with_arguments(arguments.split())
        found = read_commands(started, tmp_path / "script.sh", {}, NESTED)
    except ConfigError as error:
        assert "paste its command" in str(error)
        return
    ours = [words for words in runs(found) if not any(map(unknown_names, words))]
    unread = any(command.unread for command in found)
    assert unread or len(ours) < len(wanted)
    assert all(words in wanted for words in ours)


_UNREAD, _TESTS = {"<<", ">>", "**", "&", "|", "^", "&&", "||"}, {"<", "<=", "=="}
SIGNS = "+ - * % / < <= == && || << >> & | ^ **"


@needs_bash
@pytest.mark.parametrize("name", [*SCRIPTS, *WITH_ARGUMENTS, *FAMILIES])
def test_read_commands_equals_bash(name, tmp_path):
    """Each construct, and each way to start another script, gives the words that bash
    itself gives to the commands.
    """
    text, others = FAMILIES.get(name, ("", {}))
    text, arguments = WITH_ARGUMENTS.get(name, (text or SCRIPTS.get(name), ""))
    for other, content in {"script.sh": text, "child.sh": CHILD, **others}.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text(content)
    started = with_arguments(arguments.split()) if name in WITH_ARGUMENTS else text
    found = read_commands(started, tmp_path / "script.sh", {}, NESTED)
    assert not any(command.unread for command in found)
    assert (ours := runs(found))
    wanted = runs(commands_by_bash(text, tmp_path, arguments.split()))
    assert (
        ours == wanted if name != "pipes" else sorted(ours) == sorted(wanted)
    )  # the parts of a pipe run in any order


@needs_bash
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    signs=st.lists(st.sampled_from(SIGNS.split()), min_size=2, max_size=2),
)
@example(values=[0, 0, 1], signs=["<<", "-"])
@example(values=[40, 40, 40], signs=["<<", "+"])
def test_arithmetic_equals_bash(values, signs):
    """Arithmetic of three variables equals bash's; unknown stay what bash refuses, and
    signs that are not read.
    """
    names = "".join(
        f"{name}={value};" for name, value in zip("ABC", values, strict=True)
    )
    expression = f"$((A {signs[0]} B {signs[1]} C))"
    found = read_commands(f"{names} run {expression}", "x.sh", {}, NESTED)[0].words[1]
    answer = subprocess.run(
        ["bash", "-c", f"{names} echo {expression}"],
        capture_output=True,
        text=True,
        check=False,
    )
    unknown = show_unknown(found).startswith("$((")
    assert found == answer.stdout.strip() or (
        unknown and (answer.returncode or _UNREAD & {*signs} or {*signs} <= _TESTS)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run $N", ("run", "$N")),
        ("N=$(nproc)\nrun a=$N", ("run", "a=$N")),
        ("N=$1\nrun $N", ("run", "$N")),
        ("run x=$(( $(nproc) * 2 ))", ("run", "x=$(nproc)")),
        ("G=`nvidia-smi`\nrun $((G * 8)) ${G:-1}", ("run", "$G", "$G")),
        ("case $1 in a) L=1;; *) L=2;; esac\nrun $L", ("run", "$L")),
        ("case $(uname) in a) L=1;; *) L=1;; esac\nrun $L", ("run", "1")),
        ("for f in *.txt; do run $f; done", ("run", "$f")),
        ("N=$(x) M=3\n(( N > 4 && (M = 5) ))\nrun $M", ("run", "$M")),
        (
            "M=1 N=2\n(( M = $(f a, n=3 | g >= 2), N += 1 ))\nrun $M $N",
            ("run", "$M", "$N"),
        ),
        (
            "N='N+N+N+N' M=M\nrun $((N)) $((M)) $((1/0))",
            ("run", "$((N))", "$((M))", "$((1/0))"),
        ),
        ("M=$(x)\nrun ${M[a]} ${M[1]}", ("run", "$M", "$M")),
        ("N=2\nbash -c 'run --n $N'", ("run", "--n", "$N")),
    ],
)
def test_read_commands_names_what_it_cannot_know(text, words):
    """Output of commands, the environment, arguments and what depends on them are
    unknown and have a name.
    """
    found = read_commands(text, "x.sh", {}, NESTED)[-1].words
    assert tuple(map(show_unknown, found)) == words


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("srun -N 4 --export=ALL,A=7 job.sh 1", ("job.sh", "4", "", "7", "1")),
        ("sbatch job.sh", ("job.sh", "12", "4", "", "")),
        ("bash job.sh --nodes=4", ("job.sh", "", "", "", "--nodes=4")),
        ("bash -euo pipefail job.sh 1", ("job.sh", "", "", "", "1")),
        ("srun torchrun train.py --hook job.sh", None),
        ("chmod +x job.sh", None),
        ("bash -s 3 < job.sh", None),
        ("echo bash job.sh", None),
    ],
)
def test_read_commands_finds_the_script_of_a_command(tmp_path, text, script):
    """The script is the first word after options, shells and launchers, with Slurm's
    numbers; a file that is an argument is not.
    """
    header = "#!/bin/bash\n#SBATCH --nodes=12 # all\n#SBATCH --gpus-per-node=4\n"
    (tmp_path / "job.sh").write_text(
        header
        + 'run "${SLURM_NNODES:-}" "${SLURM_GPUS_PER_NODE:-}" "${A:-}" "${1:-}"\n'
    )
    first, *rest = read_commands(text, tmp_path / "x.sh", {}, NESTED)
    assert (first.script and Path(first.script).name) == (script[0] if script else "")
    assert [found.words[1:] for found in rest] == ([script[1:]] if script else [])
    [found] = read_commands(header + "run $SLURM_NNODES", "x.sh", {}, NESTED)
    assert found.words == ("run", "12")


def test_read_commands_executes_nothing(tmp_path):
    """No command of a script runs: neither plain ones nor substitutions, redirections,
    traps or here-documents.
    """
    target = tmp_path / "made"
    text = (
        f"touch {target}\nA=$(touch {target})\nB=`touch {target}`\necho >"
        f" {target}\neval 'touch {target}'\ntrap 'touch {target}' EXIT\n"
    )
    text += f"cat <<EOF\n$(touch {target})\nEOF\nrun <(touch {target}) $(< /etc/passwd)"
    read_commands(text, "x.sh", {}, re.compile("touch"))
    assert not target.exists()


ASKED = "the script does not say what $N is"
# What a script leaves open, and the question; or what it does not leave open.
OPEN = [
    ("if [ -f x ]; then N=1; else N=2; fi", ASKED),
    ("if echo $(x) | grep -q y; then N=4; else N=4; fi", "4"),
    ("N=8; [ -d y ] || N=4", ASKED),
    ("if [ -f x ]; then N=1; elif [ -f y ]; then N=2; fi", ASKED),
    ("if [ -f a ]; then N=1; elif [ -f b ]; then N=2; elif [ -f c ]; then N=3; elif [ -f d ]; then N=4; fi", ASKED),
    ("if nvidia-smi | grep -q H100; then N=8; else N=4; fi", ASKED),
    ("if python3 probe.py; then N=8; else N=4; fi", ASKED),
    ("N=4; if ! python3 probe.py; then exit 1; fi", "4"),
    ("M=$1; if [ $M = 7B ]; then N=8; else N=4; fi", "the script does not say what $M is"),
    ("case $(uname) in Linux) N=8;; *) N=4;; esac", ASKED),
    ("N=1; while read -r line; do N=$((N * 2)); done", ASKED),
    ("N=1; while read -r line; do N=1; done", "1"),
    ("N=1; while true; do ((N++)); done", "the script does not say what $N is"),
    ("i=0; while [ $i -lt 10000 ]; do i=$((i + 1)); N=$i; done", ASKED),
    ("for ((i = 0; i < 3; )); do M=$((M)); N=3; done", ASKED),
    ("for ((i = 0; i < K; i++)); do N=$(x $i); if [ $N = 3 ]; then M=0; else M=$(y $N); fi; if [ $i -gt 0 -a $M != $P ]; then M=2; fi; P=$M; done", ASKED),
    ("if [ -f x ]; then A=1; else A=2; fi; eval \"N=$A\"", "the script does not say what $A is"),
    ("N=0; for h in $(hosts); do N=$((N + 1)); done", ASKED),
    ("for N in 1 2 4; do [ -f x ] && break; done", ASKED),
    ("for N in 1 2 4; do if [ -f x ]; then continue; fi; done", ASKED),
    ("f() { N=1; if [ -f x ]; then return; fi; N=2; }; f", ASKED),
    ("f() { N=1; if [ ! -f x ]; then echo no; return 1; fi; N=2; }; f", "2"),
    ("f() { N=1; if [ -f x ]; then return; fi; N=2; exit 1; }; f", "1"),
    ("for N in 1 2 4; do if [ -f x ]; then M=1; break; fi; source ./exits.sh; done", ASKED),
    ("set -- 1 2; if [ -f x ]; then shift; fi; N=$1", "the script does not say what $@ is"),
    ("A=($(hosts) b); N=${#A[@]}", "the script does not say what $A is"),
    ("C=${CUDA_VISIBLE_DEVICES//[^,]/}; N=$((${#C} + 1))", "the script does not say what $C is"),
    ("M=a8; [[ $M =~ [0-9] ]]; N=${BASH_REMATCH[0]}", "the script does not say what $BASH_REMATCH is"),
    ("A=(1 2 3); unset 'A[1]'; N=${#A[@]}", "the script does not say what $A is"),
    ("if [ $(wc -l < hosts) = 0 ]; then N=$(cd x || echo 8); else N=8; fi", ASKED),
    ("N=$(awk -F, '{print NF}' <<< $CUDA_VISIBLE_DEVICES)", "the script does not say what $N is"),
    ("case $HOSTNAME in a*) N=4;; *) N=8;; esac", "the script does not say what $HOSTNAME is"),
    ("A=($(hosts) b); N=${A[1]}", "the script does not say what $A is"),
    ("A=(*.json); N=${#A[@]}", "the script does not say what $A is"),
    ("IFS=, read -ra A <<< \"$CUDA_VISIBLE_DEVICES\"; N=${#A[@]}", "the script does not say what $A is"),
    ("A=(\"$(hosts)\" b); N=${#A[@]}${A[1]}", "2b"),
    ("#SBATCH --nodes=3\nN=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)", "the script does not say what $N is"),
    ('set -- -n 2; A=$(getopt n: "$@"); eval set -- "$A"; while [ "$1" != -- ]; do case $1 in -n) N=$2; shift;; esac; shift; done', "what $A is"),
    ("set -- -n 2; while getopts $(x) o; do N=$OPTARG; done", ASKED),
    ("N=4; while [[ $# -gt 0 ]]; do case $1 in -n) N=$2; shift 2;; esac; done", "4"),
    ('N=4; while [ "$1" != "" ]; do case $1 in -n) N=$2; shift;; esac; shift; done', "4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "question"), OPEN)
def test_what_is_open_is_asked_as_it_is(text, question):
    """A condition or a loop that is not known opens what it changes, and no more; the
    question names a variable that settles it.
    """
    found = read_commands(f"{text}\nrun $N", "x.sh", {}, NESTED)[-1].words[-1]
    assert question in (explain_unknown(found) if unknown_names(found) else [found])


def test_an_array_that_is_given_has_its_words():
    """What a user gives for an array counts as its words."""
    [command] = read_commands(
        'A=($(hosts))\nrun ${#A[@]} ${A[1]} "${A[@]}"',
        "x.sh",
        {"A": "n1 n2 n3"},
        NESTED,
    )
    assert command.words == ("run", "3", "n2", "n1", "n2", "n3")


def test_a_loop_without_end_is_followed_for_a_bounded_time():
    """Loops that never end, nested too, cost a bounded number of passes."""
    text = "while true; do ((i++)); run $i; for ((;;)); do ((j++)); done; done"
    assert len(read_commands(text, "x.sh", {}, NESTED)) <= 2 * MAX_REPEATS


def test_a_sweep_reads_its_script_a_few_times(tmp_path):
    """Of very many runs, the first ones are read, and the script is parsed once; the
    others have a reason.
    """
    (tmp_path / "launch.sh").write_text(
        "while [ $# -gt 0 ]; do case $1 in -n) N=$2; shift;; esac; shift; done\nrun $N"
        ' "$M"\n'
    )
    text = (
        "for n in $LIST; do for M in a b c d e f g h; do export M\nbash launch.sh -n"
        " $n; done; done"
    )
    before = parse.cache_info().misses
    numbers = " ".join(map(str, range(32)))
    found = read_commands(f"LIST='{numbers}'\n{text}", tmp_path / "s.sh", {}, NESTED)
    assert parse.cache_info().misses - before == 2
    assert runs(found)[0] == ("run", "0", "a")
    assert len(runs(found)) == MAX_SCRIPTS
    assert [bool(command.unread) for command in found if command.script] == [
        False
    ] * MAX_SCRIPTS + [True] * (256 - MAX_SCRIPTS)
    assert "200 in all" in found[-1].unread


TOKENS = (
    "if then fi for in do done case esac { } ( ) ; && | $A ${A $(x) \" ' ` << EOF \\ ="
    " A=( [ ]] run $(( )) #"
)


@settings(max_examples=150, deadline=None)
@example(["while true; do A=1; done\nrun"])
@example(["for ((;;)); do run; done"])
@example(["f() { f; }\nf\nrun"])
@example(["A=aaaaaaaaaa\n", *['A="$A$A$A$A$A$A$A$A"\n'] * 12])
@example(
    [
        "for a in {x}; do for b in {x}; do for c in {x}; do run; done; done; done".format(
            x="x " * 64
        )
    ]
)
@example(["(" * 3000])
@example(["$((" * 500])
@example(["run $((9**9**9**9))"])
@example(["N=N+N+N+N+1; run $((N))"])
@example(["eval 'eval \"$0\"'\n"] * 50)
@example(["\ue000\ue004\0"])
@given(st.lists(st.sampled_from([*TOKENS.split(), "\n"])))
def test_read_commands_ends_on_any_script(parts):
    """Endless loops, recursion, growth, nesting and any sequence of shell tokens end
    with commands or a ConfigError.
    """
    try:
        assert isinstance(read_commands(" ".join(parts), "x.sh", {}, NESTED), list)
    except ConfigError as error:
        assert "cannot read the shell script" in str(error)
