// Command cmd serves fake nodes, to work on the page of `spillway ui` without a cluster.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"

	"spillway.dev/spillway/test/browser/ui/fakenode"
)

func main() {
	dir := flag.String("dir", os.TempDir(), "Directory of the sockets.")
	nodes := flag.Int("nodes", 1, "Number of nodes.")
	services := flag.Int("services", 0, "Number of Services of a node.")
	rate := flag.Int("rate", 60, "Events of a node in a second.")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ends := make(chan error)
	for i := range *nodes {
		n := (&fakenode.Node{Name: fmt.Sprintf("node-%c", 'a'+i), Services: *services, Rate: *rate, Healthy: i > 0}).Start()
		socket := filepath.Join(*dir, n.Name+".sock")
		listener, err := net.Listen("unix", socket)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Printf("--api-socket %s ", socket)
		go func() { ends <- n.Serve(ctx, listener) }()
	}
	fmt.Println()
	for range *nodes {
		if err := <-ends; err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
