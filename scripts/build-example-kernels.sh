#!/usr/bin/env bash
# Compiles examples/train_mlp/kernels.cu to the PTX beside it; to be run after a change of the kernels.
#
# The compiler is NVRTC out of NVIDIA's Python package, at a fixed version, so the result is the same everywhere. That
# takes python3 with venv, and the package index (or a folder that PIP_FIND_LINKS names); no GPU and no CUDA toolkit.
#
# The PTX is for compute capability 7.0 and up. NVRTC writes its own PTX version into the header, 8.4; it is lowered
# to 7.0, that of CUDA 11.0, so that older drivers take the file as well. That is right as long as the kernels use
# nothing newer, which a driver checks when it loads the file: run the example on a GPU afterwards.
set -euo pipefail
cd "$(dirname "$0")/../examples/train_mlp"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check nvidia-cuda-nvrtc-cu12==12.4.127

"$work/venv/bin/python" - kernels.cu "$work/kernels.ptx" <<'PY'
import ctypes, pathlib, sys
import nvidia.cuda_nvrtc

source, target = map(pathlib.Path, sys.argv[1:])
nvrtc = ctypes.CDLL(str(pathlib.Path(nvidia.cuda_nvrtc.__path__[0]) / "lib" / "libnvrtc.so.12"))


def text(what):
    """What nvrtcGet...Size and nvrtcGet... answer."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.value


program = ctypes.c_void_p()
options = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_70")
created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
if created != 0:
    sys.exit(f"nvrtcCreateProgram: error {created}")
failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
sys.stderr.write(text("ProgramLog").decode())
if failed:
    sys.exit(f"nvrtcCompileProgram: error {failed}")
target.write_bytes(text("PTX"))
PY

sed -E 's/^\.version .*/.version 7.0/' "$work/kernels.ptx" >kernels.ptx
echo "wrote $PWD/kernels.ptx: $(grep -c '^\.visible \.entry' kernels.ptx) kernels"
