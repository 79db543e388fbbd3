#!/usr/bin/env bash
# Tokens a second and first-token times of `vllm serve`, ours and stock, under `vllm bench serve`.
#
#   benchmarks/bench_serve.sh                       # one NVIDIA GPU: the 26B shape, dummy weights, FP8
#   MODEL=/path/to/checkpoint benchmarks/bench_serve.sh
#
# Three servers take turns: ours, stock as it comes, and stock tuned; each answers every CONCURRENCY.
# Each canvas takes exactly STEPS denoising steps and answers ignore their end, so that all do the
# same work. Without a GPU the shipped checkpoint is served at small settings, which shows that the
# script works and nothing else. Everything below can be set in the environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}

# An empty list of devices hides them from the servers, whatever nvidia-smi shows.
if [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) && [ -n "$gpu" ]; then
    : "${MODEL:=$here/configs/diffusion-gemma-26b-fp8}" "${CONCURRENCY:=1 4 8 16 32}"
    : "${INPUT_LEN:=1024}" "${OUTPUT_LEN:=1024}" "${MAX_MODEL_LEN:=4096}" "${PROMPTS:=16}"
    : "${STOCK_ENV:=VLLM_DIFFUSION_DISABLE=1}"
    : "${TUNED_OPTIONS:=--max-num-seqs 32 --compilation-config {\"max_cudagraph_capture_size\":8192}}"
else
    gpu=
    : "${MODEL:=$here/../vllm_diffusion/checkpoints/tiny_diffusion_gemma}" "${CONCURRENCY:=1 2 4}"
    : "${INPUT_LEN:=64}" "${OUTPUT_LEN:=64}" "${MAX_MODEL_LEN:=1024}" "${PROMPTS:=4}"
    # Stock's own classes need our platform to run on a CPU.
    : "${STOCK_ENV:=VLLM_PLUGINS=vllm_diffusion_cpu}" "${TUNED_OPTIONS:=--max-num-seqs 32}"
fi
: "${STEPS:=16}" "${SIDES:=ours stock tuned}" "${OURS_OPTIONS:=}" "${PORT:=8137}"
: "${OUT:=$(mktemp -d)}" "${START_SECONDS:=1800}"
# A file for the rows, as JSON lines; empty for none. ROUTING= leaves out which experts are touched.
: "${DATA:=}" "${ROUTING=yes}"
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=INFO

mkdir -p "$OUT"
folder=$OUT/model
"$python" "$here/serve_folder.py" "$MODEL" "$folder" --steps "$STEPS"
load_format=auto
ls "$folder"/*.safetensors >/dev/null 2>&1 || load_format=dummy

server=
stop_server() {
    [ -z "$server" ] || kill -INT "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" || true
    server=
}
trap stop_server EXIT

vllm() { "$python" -m vllm.entrypoints.cli.main "$@"; }

start_server() { # side, environment, options
    # shellcheck disable=SC2086  # each is a list of words
    env $2 "$python" -m vllm.entrypoints.cli.main serve "$folder" --host 127.0.0.1 --port "$PORT" \
        --served-model-name model --load-format "$load_format" --max-model-len "$MAX_MODEL_LEN" \
        --limit-mm-per-prompt '{"image":0,"video":0,"audio":0}' $3 >"$OUT/$1.log" 2>&1 &
    server=$!
    local deadline=$((SECONDS + START_SECONDS))
    until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$PORT/health')" 2>/dev/null; do
        if ! kill -0 "$server" 2>/dev/null || [ "$SECONDS" -gt "$deadline" ]; then
            tail -n 40 "$OUT/$1.log" >&2
            echo "the server \"$1\" did not start; its log is $OUT/$1.log" >&2
            exit 1
        fi
        sleep 2
    done
}

for side in $SIDES; do
    case $side in
    ours) environment="VLLM_DIFFUSION_DISABLE=0" options=$OURS_OPTIONS ;;
    stock) environment=$STOCK_ENV options= ;;
    tuned) environment=$STOCK_ENV options=$TUNED_OPTIONS ;;
    *) echo "SIDES: $side is not known; known are ours, stock, tuned" >&2 && exit 2 ;;
    esac
    echo "serving: $side" >&2
    start_server "$side" "$environment" "$options"
    for clients in $CONCURRENCY; do
        prompts=$((clients * 4 > PROMPTS ? clients * 4 : PROMPTS))
        # Stock refuses any temperature but 1.
        vllm bench serve --host 127.0.0.1 --port "$PORT" --model model --tokenizer "$folder" \
            --dataset-name random --random-input-len "$INPUT_LEN" --random-output-len "$OUTPUT_LEN" \
            --ignore-eos --temperature 1 --max-concurrency "$clients" --num-prompts "$prompts" \
            --num-warmups "$clients" --seed "$clients" --disable-tqdm --save-result \
            --result-dir "$OUT" --result-filename "$side-$clients.json" >"$OUT/$side-$clients.log" 2>&1 ||
            { tail -n 20 "$OUT/$side-$clients.log" >&2 && exit 1; }
    done
    stop_server
done

# shellcheck disable=SC2086
"$python" "$here/serve_report.py" "$OUT" --gpu "$gpu" --steps "$STEPS" \
    --sides $SIDES --concurrency $CONCURRENCY ${DATA:+--data "$DATA"}
if [ -n "$ROUTING" ]; then
    # shellcheck disable=SC2086
    VLLM_LOGGING_LEVEL=ERROR "$python" "$here/bench_routing.py" "$folder" --load-format "$load_format" \
        --canvases $CONCURRENCY 2>"$OUT/routing.log" || { tail -n 20 "$OUT/routing.log" >&2 && exit 1; }
fi
echo "logs and results: $OUT"
