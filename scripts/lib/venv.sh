# shellcheck shell=bash
# Sourced by scripts/check, scripts/test and scripts/demo: finds a Python, keeps virtual environments up to date.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Does this interpreter run, with the version wanted ("3.11"; "any" for 3.10 and later), and can it make a venv?
# A name on PATH proves nothing: pyenv's shims exist for versions that are not active.
python_works() {
    "$1" - "$2" >/dev/null 2>&1 <<'PY'
import ensurepip, sys, venv
version = sys.version_info[:2]
sys.exit(version < (3, 10) or sys.argv[1] not in ("any", "%d.%d" % version))
PY
}

# Prints the first working interpreter among the versions given, or fails.
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python3 python3; do
            if python_works "$candidate" "$version"; then
                printf '%s\n' "$candidate"
                return 0
            fi
        done
    done
    return 1
}

# What an environment is made from. Kept in it as its stamp: equal means up to date.
venv_recipe() { # EXTRA CONSTRAINTS PYTHON_VERSION...
    printf 'in %s: .[%s] python %s\n' "$ROOT" "$1" "${*:3}"
    cat -- "$ROOT/pyproject.toml" "$ROOT/hatch_build.py" "$ROOT/edge_runtime/__init__.py" ${2:+"$ROOT/$2"}
}

venv_is_current() { # NAME EXTRA CONSTRAINTS PYTHON_VERSION...
    local venv=$ROOT/$1
    shift
    [[ -x $venv/bin/python ]] && venv_recipe "$@" | cmp -s - "$venv/.recipe" && "$venv/bin/python" -c '' 2>/dev/null
}

# Makes $ROOT/NAME hold an editable install of this checkout. Does nothing when it is up to date already;
# of several callers at once, one installs and the others wait.
ensure_venv() { # NAME EXTRA CONSTRAINTS PYTHON_VERSION...
    mkdir -p -- "$ROOT/.cache"
    (
        if command -v flock >/dev/null; then flock 9; fi
        venv_is_current "$@" || make_venv "$@"
    ) 9>"$ROOT/.cache/$1.lock"
}

make_venv() { # NAME EXTRA CONSTRAINTS PYTHON_VERSION...
    local name=$1 venv=$ROOT/$1 extra=$2 constraints=$3 python
    shift 3
    rm -f -- "$venv/.recipe"
    if ! python_works "$venv/bin/python" any; then
        python=${EDGE_RUNTIME_PYTHON:-$(find_python "$@" any)} ||
            die "no Python 3.10 or later that can make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
        python_works "$python" any || die "EDGE_RUNTIME_PYTHON=$python is no working Python 3.10 or later with venv"
        "$python" -m venv --clear -- "$venv" || die "$python could not make $venv"
    fi
    say "installing into $name with $("$venv/bin/python" -V) (a minute or two the first time)"
    # -qq: errors only. The warnings are about how this machine's pip is configured.
    (cd -- "$ROOT" && "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
        ${constraints:+-c "$constraints"} -e ".[$extra]" >&2) || die "pip could not install edge-runtime[$extra] (no network?)"
    venv_recipe "$extra" "$constraints" "$@" >"$venv/.recipe"
}

# The three environments. "any" Python comes last of itself.
ensure_dev_venv() { ensure_venv .venv dev '' 3.11 3.12 3.10; }
ensure_jetpack6_venv() { ensure_venv .venv-jetpack6 dev constraints/jetpack6.txt 3.10 3.11; }
ensure_demo_venv() { # sets DEMO_VENV: the developer's environment where there is one, else one without the tools
    DEMO_VENV=.venv
    venv_is_current .venv dev '' 3.11 3.12 3.10 && return
    DEMO_VENV=.venv-demo
    ensure_venv .venv-demo demo '' 3.11 3.12 3.10
}
