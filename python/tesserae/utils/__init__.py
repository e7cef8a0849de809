"""What SMP v2 has under torch.sagemaker.utils and scripts use: modules' tensors, process groups, timing."""
