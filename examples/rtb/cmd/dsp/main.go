// Command dsp is a bidder that registers itself at an exchange: see package rtb.
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
	exchange := flag.String("exchange", "http://exchange:8080/register", "where to register")
	self := flag.String("self", "", "URL for bids, as the exchange reaches it (such as http://$(POD_IP):8080/bid)")
	price := flag.Float64("price", 0.5, "what is bid for a thousand impressions")
	flag.Parse()
	if *self == "" {
		log.Fatal("dsp: --self: give the URL that the exchange is to ask")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	go rtb.Register(ctx, *exchange, *self, func(err error) { log.Printf("dsp: %v", err) })
	if err := rtb.Serve(ctx, *listen, rtb.DSP{Price: *price}.Handler()); err != nil {
		log.Fatalf("dsp: %v", err)
	}
}
