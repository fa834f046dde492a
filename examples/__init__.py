"""Files as a user of jaxtrain would write them: nothing in the package knows of them."""
