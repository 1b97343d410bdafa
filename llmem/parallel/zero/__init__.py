"""DeepSpeed's ZeRO: stages 1 and 2, stage 3, its configuration and its optimizer step."""
