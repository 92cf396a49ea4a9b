// Command exchange is a real-time-bidding exchange: see package rtb.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"syscall"

	"spillway.dev/spillway/examples/rtb"
)

func main() {
	listen := flag.String("listen", ":8080", "address to serve on")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := rtb.Serve(ctx, *listen, rtb.NewExchange().Handler()); err != nil {
		log.Fatalf("exchange: %v", err)
	}
}
