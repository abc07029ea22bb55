#!/usr/bin/env bash
# Train on a GKE cluster that xpk has created, on one or several TPU slices.
#
#   PROJECT=my-project ZONE=us-west4-a CLUSTER=my-cluster BUCKET=my-bucket \
#       IMAGE=us-docker.pkg.dev/my-project/images/rampup launch/xpk.sh llama_1b_v5e
#
# The words after the file are those of `rampup train`. The image has this repository, installed with `pip install 'jax[tpu]' '.[gcs]'`.
set -euo pipefail

: "${PROJECT:?}" "${ZONE:?}" "${CLUSTER:?}" "${BUCKET:?}" "${IMAGE:?}"
NAME=${NAME:-rampup}
SLICES=${SLICES:-1}

case " $*" in
*" run_name="*) ;;
*) set -- "$@" "run_name=$NAME" ;;
esac
[ "$SLICES" = 1 ] || set -- "$@" "num_slices=$SLICES"

# A pod that is evicted gets SIGTERM and has the grace period to save a checkpoint. Then all pods start again, also those that failed
# because another pod was gone, and resume.
xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$NAME" \
    --tpu-type="${TYPE:-v5litepod-16}" --num-slices="$SLICES" --docker-image="$IMAGE" \
    --max-restarts=100 --restart-on-user-code-failure --termination-grace-period-seconds=300 \
    --command="$(printf '%q ' rampup train "$@" "base_output_directory=gs://$BUCKET/runs" "jax_cache_dir=gs://$BUCKET/jax-cache")"
