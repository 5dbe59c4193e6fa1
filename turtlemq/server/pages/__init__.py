"""Static files of the browser pages: HTML, scripts, styles, pictures. `turtlemq.server.handlers.pages` serves them."""
