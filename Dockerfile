# weir alone: one static binary, as nobody. Its health check is the binary itself.
#
#   docker build --build-arg VERSION=$(git describe --tags --always) -t weir .
FROM golang:1.26.8 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=devel COMMIT=unknown DATE=unknown
RUN CGO_ENABLED=0 go build -trimpath -o /out/weir \
    -ldflags "-s -w -X main.version=$VERSION -X main.commit=$COMMIT -X main.date=$DATE" ./cmd/weir

FROM scratch
# Who the system trusts, for rediss://.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/weir /weir
USER 65532:65532
EXPOSE 8080 8081
HEALTHCHECK --interval=2s --timeout=2s --start-period=30s CMD ["/weir", "health"]
ENTRYPOINT ["/weir"]
CMD ["serve"]
