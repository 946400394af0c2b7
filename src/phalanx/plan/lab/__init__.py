"""Where the cost model is fitted and judged on published runs. Nothing here is loaded to plan."""
