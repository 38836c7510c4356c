"""Programs: the commands of the terminal, the page in the browser, labelling and sorting of files, Ray."""
