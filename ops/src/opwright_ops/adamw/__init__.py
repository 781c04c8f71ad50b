from opwright_ops.adamw.optimizer import AdamW as AdamW
