# ruff: noqa: E501 - scripts are in one line
"""Tests of scripts with options of their own, loops, here-documents and small programs: the words are those of bash."""

import re

import pytest
from helpers.bash import commands_by_bash, needs_bash, runs, with_arguments

from rampup.dialects.script import MAX_LAUNCHES, MAX_REPEATS, read_commands
from rampup.dialects.shell_grammar import parse
from rampup.dialects.unknown import explain_unknown, unknown_names

NESTED = re.compile(r"\brun\b")
LONG = 'N= V= REST=(); while [[ $# -gt 0 ]]; do case "$1" in --n) N="$2"; shift 2;; --n=*) N="${1#*=}"; shift;; -v|--verbose) V=1; shift;; --) shift; break;; *) REST+=("$1"); shift;; esac; done\nrun "$N" "$V" "${REST[@]}" "$@"'
GETOPTS = 'N=256 M=1 V=0 E= U=; while getopts ":n:m:vh" o; do case $o in n) N=$OPTARG;; m) M=$OPTARG;; v) ((V++));; :) E=$OPTARG;; \\?) U=$OPTARG;; esac; done; shift $((OPTIND - 1))\nrun $N $M $V "$E" "$U" "$@" $OPTIND'
# The script and its arguments.
SCRIPTS = {
    "long options": (LONG, "--n 4 a -v b --n=8 -- --n c"),
    "no options": (LONG, ""),
    "a value that is missing": ('N=1; while [ $# -gt 0 ]; do case $1 in --n) N=$2; shift; shift;; esac; done; run "$N" $#', "--n"),
    "until there is no argument": ('until [ -z "$1" ]; do case $1 in -b) B=$2; shift;; -n) N=$2; shift;; esac; shift; done; run $B $N', "-b 3 -n 4"),
    "a word as a test": ('A=; while [ "$1" ]; do A="$A.$1"; shift; done; run $A', "1 2 3"),
    "not empty": ('while [ "$1" != "" ]; do case "$1" in a) A=1;; b) A=$((A + 1));; esac; shift; done; run $A', "a b b"),
    "n of them": ('L=; while [ -n "$1" ]; do L="$1 $L"; shift; done; run $L', "x y z"),
    "arithmetic test": ("S=0; while (( $# )); do S=$((S + $1)); shift; done; run $S", "1 2 3 4"),
    "arithmetic count": ("S=0; while (($# > 1)); do S=$((S + $1)); shift 2; done; run $S $#", "1 2 3 4 5"),
    "pattern of a word": ('while [[ "$1" == --* ]]; do k=${1#--}; declare "$k=$2"; shift 2; done; run "$lr" "$bs" "$@"', "--lr 2 --bs 8 rest"),
    "regular expression": ('while [[ $1 =~ ^-[a-z]+$ ]]; do A+=("${1:1}"); shift; done; run "${A[@]}" "$@"', "-a -bc D"),
    "key=value words": ('for a in "$@"; do k=${a%%=*}; v=${a#*=}; case $k in n) N=$v;; b) B=$v;; esac; done; run $N $B', "n=2 b=16 n=3"),
    "for without in": ('for a; do case $a in --n=*) N="${a#*=}"; shift;; esac; done; run $N "$@"', "--n=2 x --n=4"),
    "index of an argument": ('for ((i=1; i<=$#; i++)); do if [ "${!i}" = --n ]; then j=$((i + 1)); N=${!j}; fi; done; run $N', "a --n 7 b"),
    "options in a function": ('parse() { while [ $# -gt 0 ]; do case $1 in -n) N=$2; shift 2;; *) shift;; esac; done; }; parse "$@" -n 9; run $N $#', "-n 4 x"),
    "nested case": ('while [ $# -gt 0 ]; do case $1 in -m) case $2 in 7B) L=32;; 70B) L=80;; esac; shift;; esac; shift; done; run $L', "-m 7B -m 70B"),
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
    "counted": ("S=0; for ((i = 0; i < 5; i++)); do if ((i % 2)); then continue; fi; S=$((S + i)); done; run $S $i", ""),
    "counted down": ("for ((i=8; i; i/=2)); do A+=($i); done; run ${A[@]}", ""),
    "counted by two": ("for ((i=0, j=10; i < j; i+=2, j--)); do run $i $j; done", ""),
    "over an array": ('A=(1 "2 3" 4); for a in "${A[@]}"; do B+=("x$a"); done; run "${B[@]}" ${#B[@]}', ""),
    "over the keys of an array": ('S=0 A=(5 6 7); for i in "${!A[@]}"; do S=$((S + i * A[i])); done; run $S', ""),
    "two arrays": ('N=(1 2 4); B=(8 16 32); for ((i=0; i<${#N[@]}; i++)); do run ${N[$i]} ${B[i]}; done', ""),
    "while with a counter": ("N=0; i=0; while [ $i -lt 70 ]; do N=$((N + i)); i=$((i+1)); done; run $N $i", ""),
    "until with a counter": ("i=1; until ((i >= 100)); do ((i *= 2)); done; run $i", ""),
    "let in a loop": ('i=0; while :; do let i++; [ $i -ge 6 ] && break; done; run $i', ""),
    "break of two loops": ("for i in 1 2 3; do for j in 1 2 3; do if [ $i$j = 22 ]; then break 2; fi; run $i $j; done; done; run $i $j", ""),
    "continue of two loops": ("for i in 1 2; do for j in 1 2 3; do [ $j = 2 ] && continue 2; run $i $j; done; run never; done", ""),
    "break in an if": ("for n in 1 2 4 8; do if [ $n -gt 2 ]; then break; else N=$n; fi; done; run $n $N", ""),
    "long list": ("for i in {1..100}; do L=$i; done; for i in {3..1}; do run $i $L; done", ""),
    "seq": ("for i in $(seq 2 3 9) $(seq 2); do run $i; done; run $(seq 3 -1 1)", ""),
    "return of a status": ('big() { if [ $1 -gt 4 ]; then return 0; fi; return 1; }; if big 8; then N=8; fi; if ! big 2; then M=2; fi; big 3 || K=3; run $N $M $K', ""),
    "return from a loop": ('first() { for x in "$@"; do if [[ $x == b* ]]; then R=$x; return; fi; done; R=none; }; first a bc bd; run $R; first a; run $R', ""),
    "shift too far": ('shift 5; run "$@"; shift 2; run "$@" $#', "1 2 3"),
    "read of a list": ('IFS=, read -r A B C <<< "1,2,3,4"; run $A $B $C; read -r X Y <<< "  a   b c "; run "$X" "$Y"', ""),
    "separators": ('L=1,2,3; IFS=,; for x in $L; do run $x; done; A=(7 8); run "${A[*]}"; set -- $L; run $2; IFS=\' \'', ""),
    "read of an array": ('D=0,1,2,3; IFS=\',\' read -ra G <<< "$D"; run ${#G[@]} ${G[3]}; read -a H <<< "x y"; run ${H[@]}', ""),
    "read of a document": ("N=4\nread -r -d '' CMD <<EOF\nrun --n $N \\\n  --m 2\nEOF\nbash -c \"${CMD}\"", ""),
    "a document in a substitution": ("N=4\nCMD=$(cat <<'EOS'\nset -e  # it's (here\nN=5\nrun a $N\nEOS\n)\nbash -lc \"${CMD}\"\nC2=\"$(cat <<EOF\nrun b $N\nEOF\n)\"\nbash -c \"$C2\"", ""),
    "a document for bash": ("N=4\nbash <<EOF\nrun $N\nEOF\nbash -s <<'EOF'\nN=3\nrun $N.\nEOF", ""),
    "lines of a text": ("mapfile -t A <<< $'a b\\nc'\nrun \"${A[@]}\" ${#A[@]}", ""),
    "number of devices": ("export D=0,1,2,3\nrun $(echo $D | tr ',' '\\n' | wc -l) $(echo $D | awk -F, '{print NF}') $(awk -F ',' '{ print NF }' <<< \"$D\")", ""),
    "cut": ("A=v5p-128; run $(echo $A | cut -d- -f2) $(echo \"$A\" | cut -d '-' -f 1)", ""),
    "printf": ("run $(printf '%d-%s' 4 x) $(printf '%03d' 7) \"$(printf 'a b\\n')\" `echo 1 2`", ""),
    "grep of a known text": ('M=llama-70b; if echo "$M" | grep -q 70b; then T=8; else T=4; fi; if echo $M | grep -qi LLAMA; then U=1; fi; run $T $U', ""),
    "regular expressions": ('A=v5p-128; if [[ $A =~ ^v[0-9]p-([0-9]+)$ ]]; then B=1; fi; if [[ 12 =~ ^[[:digit:]]+$ && ! x =~ ^[0-9] ]]; then C=1; fi; run $B $C', ""),
    "a pipe is a shell of its own": ('N=1; echo 2 | { N=2; run in $N; }; run $N; (N=3; run $N); run $N', ""),
    "exported in a loop": ('while [ $# -gt 0 ]; do export "$1"; shift; done; bash -c \'run $A $B\'', "A=1 B=2"),
    "variables by name": ('n=0; for v in A B; do eval "$v=$((++n))"; done; run $A $B; for v in A B; do run ${!v}; done', ""),
    "set in a loop": ('for s in "1 2" "3 4"; do set -- $s; run $1 $2 $#; done', "x"),
    "local": ("f() { local N=3 M; M=2; K=$N; g; run $N $M; }; g() { N=9; }; N=1 M=1; f; run $N $M $K; h() { declare N=5; }; h; run $N", ""),
    "slices": ('A=({1..4}); run "${A[@]:1}" "${A[@]: -2}" ${#A[@]} "${A[@]/#/--}" "${A[@]/%/x}"; A[7]=9; run ${#A[@]} "${A[@]:1:2}"; printf -v P "%02d" 7; B=ab; run $P ${B^} ${B^^}', ""),
    "patterns": ("D=0,1,2,3; C=${D//[^,]/}; run $((${#C} + 1)) ${D/[0-9]/x} ${D//?,/} ${D/#0/a} ${D/%3/b} ${D/,*/} ${D/#3/c}", ""),
    "mappings": ("declare -A M; M[a]=1; M[b]=2; run ${#M[@]} ${M[b]}; declare -A E=([x]=4); E[y]=5; run ${#E[@]}", ""),
    "defaults after options": ('while getopts n: o; do case $o in n) n=$OPTARG;; esac; done; N=${n:-8}; : ${B:=$((N * 2))}; run $N $B', "-n 2"),
}  # fmt: skip


@needs_bash
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_equal_those_of_bash(name, tmp_path):
    """Options, loops and what small programs print give the same commands as bash, and none is open."""
    text, arguments = SCRIPTS[name]
    (tmp_path / "script.sh").write_text(text)
    found = read_commands(with_arguments(arguments.split()), tmp_path / "x.sh", {}, NESTED, line=0)
    assert runs(found)
    assert runs(found) == runs(commands_by_bash(text, tmp_path, arguments.split()))


WHETHER = "it is not known whether `{}` (line 1) holds, and $N depends on it"
LOOP = "the loop in line 1 is not followed to its end, and $N depends on it"
# What a script leaves open, and the question; or what it does not leave open.
OPEN = [
    ("if [ -f x ]; then N=1; else N=2; fi", WHETHER.format("[ -f x ]")),
    ("if echo $(x) | grep -q y; then N=4; else N=4; fi", "4"),
    ("N=8; [ -d y ] || N=4", WHETHER.format("[ -d y ]")),
    ("if [ -f x ]; then N=1; elif [ -f y ]; then N=2; fi", "`[ -f y ]` (line 1) holds, and $N depends on it"),
    ("if [ -f a ]; then N=1; elif [ -f b ]; then N=2; elif [ -f c ]; then N=3; elif [ -f d ]; then N=4; fi", "`[ -f a ]` (line 1) holds; nor 3 more conditions, and $N"),
    ("if nvidia-smi | grep -q H100; then N=8; else N=4; fi", WHETHER.format("nvidia-smi | grep -q H100")),
    ("if python3 probe.py; then N=8; else N=4; fi", "it is not known whether `python3 probe.py` (line 1) succeeds, and $N depends on it"),
    ("N=4; if ! python3 probe.py; then exit 1; fi", "4"),
    ("M=$1; if [ $M = 7B ]; then N=8; else N=4; fi", "the script does not say what $M is"),
    ("case $(uname) in Linux) N=8;; *) N=4;; esac", "it is not known what $(uname) is (line 1), and $N depends on it"),
    ("N=1; while read -r line; do N=$((N * 2)); done", WHETHER.format("read -r line")),
    ("N=1; while read -r line; do N=1; done", "1"),
    ("N=1; while true; do ((N++)); done", LOOP),
    ("i=0; while [ $i -lt 10000 ]; do i=$((i + 1)); N=$i; done", LOOP),
    ("for ((i = 0; i < 3; )); do M=$((M)); N=3; done", "3"),
    ("for ((i = 0; i < K; i++)); do N=$(x $i); if [ $N = 3 ]; then M=0; else M=$(y $N); fi; if [ $i -gt 0 -a $M != $P ]; then M=2; fi; P=$M; done", "the script does not say what $K is"),
    ("if [ -f x ]; then A=1; else A=2; fi; eval \"N=$A\"", "`[ -f x ]` (line 1) holds, and $A depends on it"),
    ("N=0; for h in $(hosts); do N=$((N + 1)); done", "it is not known what the loop over h in line 1 goes through, and $N depends on it"),
    ("for N in 1 2 4; do [ -f x ] && break; done", WHETHER.format("[ -f x ]")),
    ("for N in 1 2 4; do if [ -f x ]; then continue; fi; done", "4"),
    ("for i in 1 2; do for N in 3 4; do if [ -f x ]; then break 2; fi; done; N=5; done", WHETHER.format("[ -f x ]")),
    ("f() { N=1; if [ -f x ]; then return; fi; N=2; }; f", WHETHER.format("[ -f x ]")),
    ("f() { N=1; if [ ! -f x ]; then echo no; return 1; fi; N=2; }; f", "2"),
    ("f() { N=1; if [ -f x ]; then return; fi; N=2; exit 1; }; f", "1"),
    ("for N in 1 2 4; do if [ -f x ]; then M=1; break; fi; source ./exits.sh; done", WHETHER.format("[ -f x ]")),
    ("set -- 1 2; if [ -f x ]; then shift; fi; N=$1", WHETHER.format("[ -f x ]")),
    ("A=($(hosts) b); N=${#A[@]}", "the script does not say what $A is"),
    ("C=${CUDA_VISIBLE_DEVICES//[^,]/}; N=$((${#C} + 1))", "the script does not say what $CUDA_VISIBLE_DEVICES is"),
    ("M=a8; [[ $M =~ [0-9] ]]; N=${BASH_REMATCH[0]}", "the script does not say what $BASH_REMATCH is"),
    ("A=(1 2 3); unset 'A[1]'; N=${#A[@]}", "the script does not say what $A is"),
    ("N=$(wc -l < hosts)", "the script does not say what $N is"),
    ("N=$(awk -F, '{print NF}' <<< $CUDA_VISIBLE_DEVICES)", "the script does not say what $N is"),
    ("case $HOSTNAME in a*) N=4;; *) N=8;; esac", "the script does not say what $HOSTNAME is"),
    ("A=($(hosts) b); N=${A[1]}", "the script does not say what $A is"),
    ("A=(*.json); N=${#A[@]}", "the script does not say what $A is"),
    ("IFS=, read -ra A <<< \"$CUDA_VISIBLE_DEVICES\"; N=${#A[@]}", "the script does not say what $A is"),
    ("A=(\"$(hosts)\" b); N=${#A[@]}${A[1]}", "2b"),
    ("#SBATCH --nodes=3\nN=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)", "3"),
    ('set -- -n 2; A=$(getopt n: "$@"); eval set -- "$A"; while [ "$1" != -- ]; do case $1 in -n) N=$2; shift;; esac; shift; done', "what $A is"),
    ("set -- -n 2; while getopts $(x) o; do N=$OPTARG; done", "depends on it"),
    ("N=4; while [[ $# -gt 0 ]]; do case $1 in -n) N=$2; shift 2;; esac; done", "4"),
    ('N=4; while [ "$1" != "" ]; do case $1 in -n) N=$2; shift;; esac; shift; done', "4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "question"), OPEN)
def test_what_is_open_is_asked_as_it_is(text, question):
    """A condition or a loop that is not known opens what it changes, and no more; the question names it."""
    found = read_commands(f"{text}\nrun $N", "x.sh", {}, NESTED)[-1].words[-1]
    assert question in (explain_unknown(found) if unknown_names(found) else [found])


def test_an_array_that_is_given_has_its_words():
    """What a user gives for an array counts as its words."""
    [command] = read_commands('A=($(hosts))\nrun ${#A[@]} ${A[1]} "${A[@]}"', "x.sh", {"A": "n1 n2 n3"}, NESTED)
    assert command.words == ("run", "3", "n2", "n1", "n2", "n3")


def test_a_loop_without_end_is_followed_for_a_bounded_time():
    """Loops that never end, nested too, cost a bounded number of passes."""
    text = "while true; do ((i++)); run $i; for ((;;)); do ((j++)); done; done"
    assert len(read_commands(text, "x.sh", {}, NESTED)) <= 2 * MAX_REPEATS


def test_a_sweep_reads_its_script_a_few_times(tmp_path):
    """Of many runs that one line starts, the first ones are read, and the script is parsed once; the others have a reason."""
    (tmp_path / "launch.sh").write_text('while [ $# -gt 0 ]; do case $1 in -n) N=$2; shift;; esac; shift; done\nrun $N "$M"\n')
    text = "for n in {1..12}; do for M in a b c d e f g h; do export M\nbash launch.sh -n $n; done; done"
    before = parse.cache_info().misses
    found = read_commands(text, tmp_path / "sweep.sh", {}, NESTED)
    assert parse.cache_info().misses - before == 2
    assert runs(found) == [("run", "1", letter) for letter in "abcdefgh"]
    assert [bool(command.unread) for command in found if command.script] == [False] * MAX_LAUNCHES + [True] * (
        96 - MAX_LAUNCHES
    )
    assert "line 2 of" in found[-1].unread
    assert "starts launch.sh more than 8 times" in found[-1].unread
