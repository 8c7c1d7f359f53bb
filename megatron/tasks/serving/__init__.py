"""A trained GPT behind HTTP: what a request may say, who is continued when, the routes, the page to type into."""
