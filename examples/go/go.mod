module example.org/turtlemq-worker

go 1.19
