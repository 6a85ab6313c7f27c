#!/usr/bin/env bash
# Sets up the environment and does the whole job on generated volumes: autoencoder, latent diffusion, samples. CPU or GPU,
# any directory. Arguments are config overrides for both stages, for example: ldm.training.max_steps=100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements.txt

config=configs/quickstart.yaml
run="${LEAN3D_RUNS:-runs}/quickstart"
for word in "$@"; do
    if [[ "$word" == name=* ]]; then
        run="${LEAN3D_RUNS:-runs}/${word#name=}"
    fi
done
python train_autoencoder.py --config "$config" "$@"
python train_ldm.py --config "$config" "$@"
python scripts/sample.py --run "$run" --num 4 --out "$run/samples"
