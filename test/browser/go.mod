// A module of its own: no other test of the product opens a page in chromium.
module spillway.dev/spillway/test/browser

go 1.26.0

replace spillway.dev/spillway => ../..

require spillway.dev/spillway v0.0.0

require (
	connectrpc.com/connect v1.21.1
	github.com/chromedp/cdproto v0.159.2
	github.com/chromedp/chromedp v0.23.0
	google.golang.org/protobuf v1.36.12
)

require github.com/go-json-experiment/json v0.0.0-20260213210345-44df1a37e875 // indirect
