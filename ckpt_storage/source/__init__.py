"""What a checkpoint contains and where its bytes lie: ours, stock DCP, safetensors."""
