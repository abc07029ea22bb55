# ruff: noqa: E501 - scripts and commands are in one line, as people write them
"""Tests of rampup.dialects.script: shell scripts are read as bash would expand them, and never executed."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers.bash import commands_by_bash, needs_bash, runs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rampup.dialects.script import read_commands
from rampup.dialects.unknown import show_unknown
from rampup.errors import ConfigError

NESTED = re.compile(r"\brun\b")
SCRIPTS = {
    "assignments": 'A=1; B=$A$A\nC="x $B"\nexport D="$C" E=5\nrun $A ${B} $C "$C" \'$C\' $D$E',
    "prefixed assignments": "A=1\nA=2 B=3 run $A",
    "continuation": "run --a 1 \\\n  --b 2 \\\n  # the end\nrun --c",
    "comments": "# no\nrun a#b '#c' # d\nrun e;# f\nrun g",
    "arrays": 'A=(--a 1 "b c" ${UNUSED:-})\nA+=(--d 2\n  # inside\n  --e "3")\nrun "${A[@]}" ${#A[@]} ${A[1]} "${A[*]}" "x${A[@]}y" "${A[@]:2:2}"',
    "assigned item": "A=(1 2 3)\nA[1]=9\nrun ${A[@]} ${A[-1]}",
    "mapping": 'declare -A M=([a]=1 [b]="2 3")\nM[c]=4\nK=b\nrun ${M[a]} "${M[$K]}" ${M[c]}',
    "options in a text": 'ARGS="--a 1 \\\n --b 2"\nARGS+=" --c 3"\nrun $ARGS "$ARGS"',
    "arguments left out": 'run a "$@" b $* c',
    "defaults": 'run ${A:-1} ${B-2} ${C:=3} $C ${C:+4} ${D:+5}. ${1:-8} ${2-9} "${E:-a b}" ${E:-a b}',
    "nested defaults": "N=4\nrun ${A:-${B:-$((N * 2))}} ${N:-${X}}",
    "changes": "P=/a/b.c.d\nrun ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P/b/X} ${P//\\//_} ${P:2:3} ${P: -1} ${#P} ${P^^} ${P,,}",
    "indirect": "A=B\nB=7\nrun ${!A}",
    "arithmetic": "A=7\nB=2\nrun $((A / B)) $((-A / B)) $((A % B)) $((A ** B)) $((A*(B+1))) $(( (A>B) ? 10 : 20 )) $[A+B] $((A>3&&B>3))",
    "arithmetic commands": "((N = 3 * 4)); ((N++)); ((N += 2)); let M=N*2\nrun $N $M",
    "arithmetic assignments": 'N=2\n(( N <<= 1 ))\n((M = 1, N |= 8)); let "M += 4, N ^= 1" K=N\nrun $N $M $K $((N &= 12, N)) $((A = B = 5)) $A $B\nfor ((i=0, j=9; i<2; i++, j--)); do run $i $j; done\nif ((N >= 12 && N <= 12 && N != 3 && N == 12)); then run $N; fi',
    "arithmetic conditions": "N=2 M=3\n(( M > 4 && (N = 5) ))\nrun $N $(( 0 || (M -= 1) )) $M $(( 1 ? N = 7 : (M = 9) )) $N $M $(( 0 && 1 / 0 ))",
    "arithmetic changes": 'N=2 M=3\nrun $(( M++ * 2 )) $M $(( --M - -N )) $(( N <<= 2 )) $N $(( (M += 2, M) )); A=(1 2); i=1; ((A[0] *= 4)); ((A[i] += 1)); A[i+1]=9; run ${A[@]} ${A[i]}; E="N*2"; run $((E + 1)) $((010 + 0x10))',
    "conditions": 'N=2\nif [ $N -gt 1 ] && [[ "$N" == 2* ]]; then A=1; elif true; then A=2; else A=3; fi\nrun $A',
    "else": 'if [ -n "$NOT_SET" ]; then A=1; else A=2; fi\n[[ -z $NOT_SET ]] && B=1 || B=2\n[ ! 3 -lt 2 ] && C=1\nrun $A $B $C',
    "strings compared": 'A="x y"\nif [[ $A != "x y" || ( $A < z && 1 -eq 1 ) ]]; then run 1; else run 2; fi',
    "empty without quotes": "if [ $NOT_SET = 7B ]; then L=1; elif [ $NOT_SET -gt 3 ]; then L=2; else L=3; fi\nrun $L",
    "case": "for m in 7B 13B other; do case $m in 7B|8B) L=32;; 13*) L=40 ;; *) L=0;; esac; run $m $L; done",
    "loops": "for i in 1 2 'a b'; do for j in {1..2}; do run $i \"$i\" $j; done; done\nfor ((k=0; k<3; k++)); do run $k; done",
    "break and continue": "for i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; run $i; done",
    "functions": 'f() { local x=$1; shift; run "$x" "$@" $#; return 0; run never; }\nfunction g { f 1 "$1"; }\ng "a b"',
    "usage": "if [ $# -gt 5 ]; then echo usage; exit 1; fi\nrun a",
    "pipes": "run a 2>&1 | run b > /dev/null &\nrun c >> /dev/null 2>/dev/null && run d || run e\n(run f; X=1)\n{ run g${X:-}; }",
    "here-document": "N=3\nrun <<EOF\n$N a b\nEOF\nrun a <<-'X' > /dev/null\n\t$N\n\tX\nrun b <<< \"$N\"",
    "quoted commands": "export N=3\nrun bash -c \"run a $N \\$N\"\nrun bash -c 'run b $N.'",
    "variables of a shell in quotes": "A=1\nexport B=2\nC=3\nexport C\ndeclare -x D=4\nE=5 bash -c 'run a $A. $B $C $D $E'\nbash -c \"run b $A \\$A. $E.\"",
    "all variables exported": "A=1\nset -a\nB=2\nset +a\nbash -c 'run $A. $B'",
    "eval": "C='run a \"b c\"'\neval $C",
    "set": 'set -euo pipefail\nset -- 1 "2 3"\nrun "$@" $2',
    "quotes": 'run \'a\'"b"c \\$x "\\"q\\"" $\'t\\tb\' "" \'\'',
    "while": "while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2;; esac; done\nrun ${N:-1}",
    "exit": "run a\nexit 0\nrun b",
    "carriage returns in quotes": "run 'a\tb' \"c\td\"",
}


# Scripts that start others: the first, and the others beside it.
CHILD = 'run "$@" $# ${1:-} $A. $B. $C.\n'
FAMILIES = {
    "arguments": ('bash child.sh 1 "2 3"\nsh ./child.sh a b', {}),
    "own folder": ('D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nbash "$D/child.sh" 1\nbash $(dirname "$0")/child.sh 2', {}),
    "path of itself": (
        'P=$(realpath "$0")\nbash "${P%/*}/child.sh" $(basename $0 .sh)\nD=`dirname $(readlink -f "$0")`; bash $D/sub/../child.sh',
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
    "break of too many": ("for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break 7; run $j; done; run never; done; run $i $j", {}),
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
    "functions": ('run() { :; }; g() { bash child.sh "$1"; }\nexport -f g\nbash x.sh; g 1', {"x.sh": "run x\ng 2"}),
    "itself": ('case "${1:-}" in "") bash "$0" 1;; 1) A=2 bash $0 2 x;; *) bash child.sh "$@";; esac', {}),
    "itself by its environment": ('export B\nif [ -z "$B" ]; then B=1 bash $0; else run $B; fi', {}),
    "loop": ("for n in 1 2; do A=$n bash child.sh $n; done", {}),
    "without suffix": ("bash x 1", {"x": 'run "$@"'}),
}  # fmt: skip


SIGNS = "+ - * % / < <= == && || << >> & | ^ **"


@needs_bash
@pytest.mark.parametrize("name", [*SCRIPTS, *FAMILIES])
def test_read_commands_equals_bash(name, tmp_path):
    """Each construct, and each way to start another script, gives the words that bash itself gives to the commands."""
    text, others = FAMILIES.get(name) or (SCRIPTS[name], {})
    for other, content in {"script.sh": text, "child.sh": CHILD, **others}.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text(content)
    found = read_commands(text, tmp_path / "script.sh", {}, NESTED)
    assert not any(command.unread for command in found)
    ours, wanted = runs(found), runs(commands_by_bash(text, tmp_path))
    assert ours == wanted if name != "pipes" else sorted(ours) == sorted(wanted)  # the parts of a pipe run in any order


@needs_bash
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    signs=st.lists(st.sampled_from(SIGNS.split()), min_size=2, max_size=2),
)
@example(values=[0, 0, 1], signs=["<<", "-"])
@example(values=[40, 40, 40], signs=["<<", "+"])
def test_arithmetic_equals_bash(values, signs):
    """Arithmetic of three variables equals bash's; unknown stay what bash refuses, and what C leaves undefined or cuts off."""
    names = "".join(f"{name}={value};" for name, value in zip("ABC", values, strict=True))
    expression = f"$((A {signs[0]} B {signs[1]} C))"
    found = read_commands(f"{names} run {expression}", "x.sh", {}, NESTED)[0].words[1]
    answer = subprocess.run(["bash", "-c", f"{names} echo {expression}"], capture_output=True, text=True, check=False)
    unknown = show_unknown(found).startswith("$((")
    assert found == answer.stdout.strip() or (unknown and (answer.returncode or {"<<", ">>", "**"} & set(signs)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run $N", ("run", "$N")),
        ("N=$(nproc)\nrun a=$N", ("run", "a=$N")),
        ("N=$1\nrun $N", ("run", "$N")),
        ("run x=$(( $(nproc) * 2 ))", ("run", "x=$(nproc)")),
        ("G=`nvidia-smi`\nrun $((G * 8)) ${G:-1}", ("run", "$G", "$G")),
        ("if [ -f file ]; then N=1; else N=2; fi\nrun $N", ("run", "$N")),
        ("M=$1\nif [ $M = 7B ]; then L=32; else L=40; fi\nrun $L", ("run", "$M")),
        ("case $1 in a) L=1;; *) L=2;; esac\nrun $L", ("run", "$L")),
        ("case $(uname) in a) L=1;; *) L=1;; esac\nrun $L", ("run", "1")),
        ("for f in *.txt; do run $f; done", ("run", "$f")),
        ("N=$(x) M=3\n(( N > 4 && (M = 5) ))\nrun $M", ("run", "$M")),
        ("M=1 N=2\n(( M = $(f a, n=3 | g >= 2), N += 1 ))\nrun $M $N", ("run", "$M", "$N")),
        ("N='N+N+N+N' M=M\nrun $((N)) $((M)) $((1/0))", ("run", "$((N+N+N+N))", "$((M))", "$((1/0))")),
        ("M=$(x)\nrun ${M[a]} ${M[1]}", ("run", "$M", "$M")),
        ("N=2\nbash -c 'run --n $N'", ("run", "--n", "$N")),
        ("while read -r line; do N=$line; done\nrun ${N:-3}", ("run", "$N")),
    ],
)
def test_read_commands_names_what_it_cannot_know(text, words):
    """Output of commands, the environment, arguments and what depends on them are unknown and have a name."""
    found = read_commands(text, "x.sh", {}, NESTED)[-1].words
    assert tuple(map(show_unknown, found)) == words


def test_read_commands_takes_given_variables():
    """A given variable wins over the script's assignment, and decides its conditions."""
    text = "N=2\nM=$1\nif [ $M = big ]; then L=40; else L=$N; fi\nrun $N $L"
    assert read_commands(text, "x.sh", {"N": "8", "M": "big"}, NESTED)[0].words == ("run", "8", "40")


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
    """The script is the first word after options, shells and launchers, with Slurm's numbers; a file that is an argument is not."""
    header = "#!/bin/bash\n#SBATCH --nodes=12 # all\n#SBATCH --gpus-per-node=4\n"
    (tmp_path / "job.sh").write_text(header + 'run "${SLURM_NNODES:-}" "${SLURM_GPUS_PER_NODE:-}" "${A:-}" "${1:-}"\n')
    first, *rest = read_commands(text, tmp_path / "x.sh", {}, NESTED)
    assert (first.script and Path(first.script).name) == (script[0] if script else "")
    assert [found.words[1:] for found in rest] == ([script[1:]] if script else [])
    [found] = read_commands(header + "run $SLURM_NNODES", "x.sh", {}, NESTED)
    assert found.words == ("run", "12")


def test_every_line_of_a_slurm_header_counts():
    """Lines that follow each other directly are all read."""
    header = "#!/bin/bash\n#SBATCH -N 3\n#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node 2\n"
    [found] = read_commands(f"{header}run $SLURM_NNODES $SLURM_GPUS_PER_NODE $SLURM_NTASKS_PER_NODE", "x.sh", {}, NESTED)
    assert found.words == ("run", "3", "4", "2")


def test_read_commands_executes_nothing(tmp_path):
    """No command of a script runs: neither plain ones nor substitutions, redirections, traps or here-documents."""
    target = tmp_path / "made"
    text = f"touch {target}\nA=$(touch {target})\nB=`touch {target}`\necho > {target}\neval 'touch {target}'\ntrap 'touch {target}' EXIT\n"
    text += f"cat <<EOF\n$(touch {target})\nEOF\nrun <(touch {target}) $(< /etc/passwd)"
    read_commands(text, "x.sh", {}, re.compile("touch"))
    assert not target.exists()


TOKENS = "if then fi for in do done case esac { } ( ) ; && | $A ${A $(x) \" ' ` << EOF \\ = A=( [ ]] run $(( )) #"


@settings(max_examples=150, deadline=None)
@example(["while true; do A=1; done\nrun"])
@example(["for ((;;)); do run; done"])
@example(["f() { f; }\nf\nrun"])
@example(["A=aaaaaaaaaa\n", *['A="$A$A$A$A$A$A$A$A"\n'] * 12])
@example(["for a in {x}; do for b in {x}; do for c in {x}; do run; done; done; done".format(x="x " * 64)])
@example(["(" * 3000])
@example(["$((" * 500])
@example(["run $((9**9**9**9))"])
@example(["N=N+N+N+N+1; run $((N))"])
@example(["eval 'eval \"$0\"'\n"] * 50)
@example(["\ue000\ue004\0"])
@given(st.lists(st.sampled_from([*TOKENS.split(), "\n"])))
def test_read_commands_ends_on_any_script(parts):
    """Endless loops, recursion, growth, nesting and any sequence of shell tokens end with commands or a ConfigError."""
    try:
        assert isinstance(read_commands(" ".join(parts), "x.sh", {}, NESTED), list)
    except ConfigError as error:
        assert "cannot read the shell script" in str(error)
