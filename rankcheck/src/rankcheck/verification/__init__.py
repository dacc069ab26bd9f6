"""Does any training script train on N processes as on one?"""
