#!/usr/bin/env bash
# Train on all hosts of a Cloud TPU slice: create it, copy this repository to every host, install it, and start one command everywhere.
#
#   BUCKET=my-bucket ZONE=us-west4-a launch/tpu_vm.sh llama_1b_v5e run_name=demo
#
# The words after the file are those of `rampup train`. Started again, it uses the slice that is there and resumes the run. Delete a
# preempted slice before: gcloud compute tpus tpu-vm delete rampup --zone=us-west4-a
set -euo pipefail
cd "$(dirname "$0")/.."

: "${BUCKET:?the bucket for checkpoints, metrics and compiled programs}" "${ZONE:?the zone of the slice}"
NAME=${NAME:-rampup}
TYPE=${TYPE:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}

on_all_hosts() { gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"; }

if ! gcloud compute tpus tpu-vm describe "$NAME" --zone="$ZONE" >/dev/null 2>&1; then
    gcloud compute tpus tpu-vm create "$NAME" --zone="$ZONE" --accelerator-type="$TYPE" --version="$VERSION"
fi
gcloud compute tpus tpu-vm scp --recurse . "$NAME:rampup" --zone="$ZONE" --worker=all
# The Python of the image may be older than 3.11.
on_all_hosts "python3 -m pip install --quiet uv && python3 -m uv venv --quiet --allow-existing --python 3.12 env &&
    python3 -m uv pip install --quiet --python env 'jax[tpu]' './rampup[gcs]'"

# JAX finds the other hosts by itself. All of them must mean the same run, so the name is part of the command.
case " $*" in
*" run_name="*) ;;
*) set -- "$@" "run_name=$NAME" ;;
esac
on_all_hosts "$(printf '%q ' env/bin/rampup train "$@" "base_output_directory=gs://$BUCKET/runs" "jax_cache_dir=gs://$BUCKET/jax-cache")"
