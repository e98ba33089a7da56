"""What only some profiles say: kinds as tables, words for axes and symbols, branches."""
