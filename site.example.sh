# The settings of a site. Copy this file to site.sh and edit the copy:
# activate.sh reads it each time, in bash or zsh, before it does anything else.
# The settings are independent of each other; a laptop needs none of them.
# shellcheck shell=bash disable=SC2034 # activate.sh uses them

# --- Modules: Python 3.10 to 3.14, and what the GPUs need -------------------
# `|| return` stops activate.sh if a module cannot be loaded.
#
# Baskerville (A100):
#   module purge
#   module load baskerville || return
#   module load Python || return    # `module avail Python` lists the versions
#
# A plain cluster:
#   module load python || return
#
# Not `module load cuda`: a build of PyTorch brings CUDA's libraries, and the
# module's libcudnn and libnccl would come before them. `python -m workshop
# doctor` says on a GPU which ones are loaded.
#
# Networks by libfabric: Slingshot (HPE) and EFA (AWS). NCCL needs a plugin for
# them, which the build of PyTorch does not bring; without it NCCL goes on over
# TCP, several times slower. `python -m workshop doctor --ranks` on two nodes
# says what it uses: "AWS Libfabric" or "OFI" is the plugin.
#
# Perlmutter (A100, Slingshot): NERSC's own PyTorch, which has the plugin:
#   module load pytorch || return   # and WORKSHOP_SITE_PACKAGES=yes, below
#
# Isambard-AI (GH200, Slingshot): its module also sets NCCL's options.
#   module load cray-python brics/nccl || return
#
# AWS (EFA): the images for deep learning have the plugin in one of these.
#   export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib
#
# Polaris (A100, Slingshot): jobs of several nodes hung with what its module
# sets. Start them by `mpiexec --cpu-bind depth --depth 8`, or all processes of
# a node share a core.
#   unset NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_NET NCCL_NET_GDR_LEVEL

# --- Package index: a mirror, or another build of PyTorch -------------------
# uv installs the packages: the site's, or one that pip brings. Of pip's
# settings, here or in a pip.conf, it is given those that say which packages to
# take, and from where, but none that puts them elsewhere. The same is true of
# uv's variables, and of your and the system's uv.toml. A uv.toml or [tool.uv]
# of a folder above this clone is not read.
#
# An NVIDIA driver older than 580 (nvidia-smi names it) needs a build of PyTorch
# for CUDA 12, from PyTorch's index for it. PyTorch 2.11 has cu126 and cu128,
# 2.12 to 2.14 have cu126 alone, and 2.15 is planned without any. cu126 is also
# what a V100 needs; it does not know Blackwell GPUs such as B200.
#
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126
#
# Intel Max 1550: PyTorch's index of builds for XPU (pytorch.org names it).
#
#   export PIP_EXTRA_INDEX_URL=https://wheels.example.org/xpu
#
# AMD (MI250X, MI300A, MI300X): PyTorch's index of builds for ROCm. pytorch.org
# names those of each version; `amd-smi version` prints the ROCm of this node.
# NCCL's place is taken by RCCL, which PyTorch calls nccl, too, and which reads
# the same NCCL_ variables.
#
#   export PIP_EXTRA_INDEX_URL=https://wheels.example.org/rocm
#
# Nodes that reach the internet only through a mirror:
#   export PIP_INDEX_URL=https://mirror.example.org/simple

# --- An environment for everyone --------------------------------------------
# The owner of this folder sources activate.sh while it is empty: that sets it
# up. All others use it as it is, with the packages and scripts of their own
# clone. Later, only `WORKSHOP_INSTALL=yes source activate.sh` changes it; a
# word adds a part, such as `source activate.sh fineweb`.
#
#   WORKSHOP_VENV=/shared/workshop/venv
#
# Or an archive of it (setup.sh pack), which each node unpacks on its own disk,
# in $TMPDIR or /tmp: faster where the shared disk is slow.
#
#   WORKSHOP_VENV=/shared/workshop/venv.tar.zst

# --- The site's own PyTorch, from a module above, instead of a downloaded one
#   WORKSHOP_SITE_PACKAGES=yes

# --- Data: a folder of FineWeb shards, used if no other is named ------------
#   export WORKSHOP_DATA=/shared/workshop/edu_fineweb10B
#
# A folder that has GPT-2's vocabulary, if the nodes have no internet:
#   export TIKTOKEN_CACHE_DIR=/shared/workshop/tiktoken

# --- The lessons: only the place and the reason of each change -------------
# A hint in words, the lines and the code are then a click away each (in a
# terminal: `diff ddp 7 --hints`, and `diff ddp 7 --no-hints` for the code).
#
#   export WORKSHOP_HINTS=yes

# --- The class board: only those who take part have this line ---------------
# Then `diff` and `check` add lines to a file there that all can read: which
# changes are left, and what a check found. `python -m workshop class FOLDER`
# shows them without names; the files belong to the users who write them.
#
#   export WORKSHOP_CLASS=/shared/workshop/class

# --- SLURM: what your site asks for, for sbatch and salloc ------------------
# sbatch reads these from the shell that has sourced activate.sh.
#
# Baskerville (4 x A100-40 per node):
#   export SBATCH_ACCOUNT=my-project SBATCH_QOS=my-qos
#   export SBATCH_RESERVATION=my-course     # on the days of the course
#
# Intel Max 1550 (a GPU has two tiles; this makes them one device):
#   export SBATCH_ACCOUNT=my-project SBATCH_PARTITION=my-partition
#   export ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE
#
# A plain cluster:
#   export SBATCH_PARTITION=gpu
#
# salloc has names of its own: repeat for it what you have set, for example
#   export SALLOC_ACCOUNT=$SBATCH_ACCOUNT SALLOC_PARTITION=$SBATCH_PARTITION
#   export SALLOC_RESERVATION=$SBATCH_RESERVATION

# --- Network: if the processes of several nodes do not find each other ------
# The interface that connects the nodes (`ip address` lists them). The login
# node may not have it, and gloo refuses a name that is not there:
#   if [ -e /sys/class/net/ib0 ]; then
#       export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
#   fi

# --- The slides: what they say of your site and your session ----------------
# `python -m slides` shows these on the first and the last page and on "Your
# session", with the account, the partition and the reservation above.
#
#   WORKSHOP_SPEAKER="Ada Example, Example University"
#   WORKSHOP_EVENT="Summer school on machine learning"
#   WORKSHOP_DATE="3 June 2027"
#   WORKSHOP_ADDRESS=https://git.example.org/gpt2-workshop    # to clone
#   WORKSHOP_DOCS=https://docs.example.org                    # of the cluster
#   WORKSHOP_VIDEO=https://video.example.org/gpt2             # a recording
#   WORKSHOP_TALKS=https://example.org/talks
#   WORKSHOP_THANKS="The computing time was given by the Example Centre."
#
# What the form of your portal asks for:
#   WORKSHOP_PORTAL=https://portal.example.org
#   WORKSHOP_KERNEL="Python 3; no conda environment"
#   WORKSHOP_HOURS=3
#   WORKSHOP_GPUS=1
