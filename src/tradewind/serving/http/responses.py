"""stub"""
from tradewind.serving.http.embeddings import EmbeddingsEndpoint as ResponsesEndpoint
